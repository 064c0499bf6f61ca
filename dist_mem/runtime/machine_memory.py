"""Limits of the memory that this process may use: of its machine or GPU, its control groups, and its resource limits.

A limit is the total, not what other processes leave free. A limit that several ranks share has the same name on all of
them.

Freed memory is kept in the process: glibc returns large blocks to the system when they are freed, and takes them back
page by page, cleared, in the next step, which on CPUs costs up to a tenth of a training step. GPUs have an allocator of
their own.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dist_mem.runtime.environment import node_name
from dist_mem.runtime.processes import boot_id

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; version 1 of control groups writes a number near 2^63 for no limit


def return_free_memory() -> None:
    """Give memory that was freed back to the system; glibc keeps most of what many small pieces have used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries lack it
        trim(0)


class Limit(NamedTuple):
    """A limit on the bytes of all processes that share it."""

    name: str  # equal on all ranks that share the limit
    text: str  # description for messages
    num_bytes: int


def memory_limits(device: torch.device) -> list[Limit]:
    """Return the limits of allocations on this device; empty if the system reports none."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        num_bytes = torch.cuda.mem_get_info(device)[1]
        return [Limit(f"{_machine()} {properties.uuid}", f"the {properties.name} of {node_name()}", num_bytes)]
    return [*_of_machine(), *_of_control_groups(), *_of_process()]


def _machine() -> str:
    return boot_id() or node_name()


def _of_machine() -> Iterator[Limit]:
    with suppress(OSError):
        installed = _read_meminfo()
        yield Limit(_machine(), f"{node_name()}, swap included", installed["MemTotal"] + installed["SwapTotal"])


def _read_meminfo() -> dict[str, int]:
    """Return the bytes of each line of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}


def _of_control_groups() -> Iterator[Limit]:
    """Yield the limits of this process's control group and its parents; Slurm and containers set them."""
    with suppress(OSError):
        swap = _read_meminfo()["SwapTotal"]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _of_folders(_CGROUPS, path, "memory.max", swap)
            elif "memory" in controllers.split(","):
                yield from _of_folders(_CGROUPS / "memory", path, "memory.limit_in_bytes", swap)


def _of_folders(root: Path, path: str, file: str, swap: int) -> Iterator[Limit]:
    """Yield the limits of a control group and its parents.

    Args:
        file: of the limit without swap, in the version of control groups that `root` has.
        swap: bytes of the machine.
    """
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        num_bytes = _bytes_with_swap(group, file, swap)
        if num_bytes < _NO_LIMIT:
            yield Limit(f"{_machine()} group {group.stat().st_ino}", f"{group} ({file})", num_bytes)
        if group == root:
            return


def _bytes_with_swap(group: Path, file: str, swap: int) -> int:
    """Return the limit of memory and swap together. Few groups limit swap, but none has more than the machine."""
    memory = _bytes_of(group / file)
    if file == "memory.max":
        return memory + min(_bytes_of(group / "memory.swap.max"), swap)
    return min(memory + swap, _bytes_of(group / "memory.memsw.limit_in_bytes"))


def _bytes_of(file: Path) -> int:
    with suppress(OSError):  # no such file: the root group has none, and a container sees only some groups
        text = file.read_text(encoding="ascii").strip()
        return _NO_LIMIT if text == "max" else int(text)
    return _NO_LIMIT


def _of_process() -> Iterator[Limit]:
    for kind, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield Limit(f"{_machine()} {os.getpid()} {name}", f"{name} on {node_name()}", soft)


# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_OPTIONS = {
    # Larger blocks have a mapping of their own, which free() returns. This is glibc's largest threshold. Without any
    # mapping, a small block that stays in the place of a large one makes the next large one take new memory.
    _M_MMAP_THRESHOLD: 32 * 2**20,  # bytes
    _M_TRIM_THRESHOLD: 2**31 - 1,  # the largest value: the top of the heap is not returned below 2 GiB
    _M_TOP_PAD: 64 * 2**20,  # bytes; the heap grows in steps of this size
}


def keep_heap() -> bool:
    """Configure the allocator of this process to keep what is freed; return whether it is glibc's, and so was.

    The process stays as large as it has been once: memory that a start needs only once is reused, not returned.
    """
    version = "CS_GNU_LIBC_VERSION"
    if version not in os.confstr_names or not os.confstr(version):
        return False  # macOS or musl
    set_option = ctypes.CDLL(None).mallopt
    return all(set_option(option, value) == 1 for option, value in _OPTIONS.items())

"""A rank and its GPU: what it is, the cores next to it on a machine with several NUMA nodes, the precision of products.

Every GPU hangs on the PCI bus of one NUMA node. A rank whose threads run on another one reaches GPU, pinned memory and
network card through the link between processors. Slurm numbers cores and GPUs independently, so a rank binds itself.
Run on one H100; tests use a made-up /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_mem.runtime.devices import FORMS, Device, device_named, gpu_of

SYS = Path("/sys")


class GpuPlace(NamedTuple):
    """Where a GPU is attached."""

    address: str  # on the PCI bus, as 0000:3b:00.0
    node: int | None  # NUMA node; None: the machine has one, or does not say
    cores: frozenset[int]  # logical CPUs next to it; empty: not known


def gpu_place(index: int) -> GpuPlace:
    """Return the place of a GPU that torch sees; `index` is torch's."""
    properties: Any = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    folder = SYS / "bus" / "pci" / "devices" / address
    return GpuPlace(address, numa_node(folder), frozenset(parse_cores(_read(folder / "local_cpulist"))))


def numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device by its folder in /sys; None if the machine has one node or does not say."""
    text = _read(device / "numa_node")
    return int(text) if text.isdigit() else None  # -1: not known


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list of the kernel, as "0-15,64-79"."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""


def bind_to_gpu(index: int) -> bool:
    """Restrict all threads of this process to those of its cores that are next to its GPU.

    Returns:
        Whether the process now runs next to its GPU only. False leaves the cores as they were: the launcher has given
        it none of those, or the machine does not say which they are. The doctor reports both.
    """
    near = gpu_place(index).cores & os.sched_getaffinity(0)
    if not near:
        return False
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), near)
    return True


def device_of(name: str) -> Device:
    """Return `device_named`, but this machine's GPU, with its own memory, if it has one of this name or family.

    Raises:
        UnusableError: no device has this name.
    """
    if torch.cuda.is_available():
        found = gpu_of(torch.cuda.get_device_name())
        if found and (found.name == name.lower() or (name.lower() in FORMS and found.name.startswith(name.lower()))):
            return found._replace(memory=torch.cuda.get_device_properties(0).total_memory)
    return device_named(name)


def present_device(place: Any, name: str) -> torch.device:
    """Return a device of this machine.

    Raises:
        ValueError: there is none; the message has the name of the argument.
    """
    try:
        device = torch.device(place)
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch's, for a device that this build does not know
        is_one = isinstance(place, str | int | torch.device)
        reason = str(error).partition("\n")[0] if is_one else "a whole model is on one device"
        raise ValueError(f"{name} is {place!r}, but must be a device of this machine: {reason}") from error
    return device


def set_arithmetic(*, tf32: bool) -> None:
    """Set how this process computes on GPUs: products of float32, and convolutions in the same order in every run.

    Args:
        tf32: products and convolutions of float32 may use TF32 (10 of 23 bits of the mantissa). torch itself forbids
            it for products and allows it for convolutions, which the Compressive Transformer and the ∞-former have.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # Some of its gradients are sums by atomic adds, and `benchmark` would choose by the time in this process.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


@contextmanager
def convolutions_as_products() -> Iterator[None]:
    """Let convolutions of float32 use TF32 in the block only if products may, as after `set_arithmetic`.

    For a model in a process of others, which it leaves as it was.
    """
    cudnn: Any = torch.backends.cudnn  # its types do not know `conv`
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before

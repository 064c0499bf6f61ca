"""Rendezvous of the ranks before they join: check that all are present and that each has its accelerator.

A node that has lost its GPU would join with gloo while the others wait for it with NCCL, for half an hour and without a
message. So every rank first writes an entry with its node and GPU to the store that torch will use too; rank 0 reads
the entries and writes its verdict.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_mem.errors import RunError
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.limits import raise_open_files
from dist_mem.runtime.network_interface import describe_address
from dist_mem.runtime.ranks import (
    agent_keeps_store,
    export_for_libraries,
    gpus_are_hidden,
    job_identity,
    launcher_restarts,
    read_ranks,
    rendezvous_address,
    slurm_gave_gpus,
    slurm_nodes,
)
from dist_mem.runtime.terminal import count_noun, some
from dist_mem.supervision.findings import RENDEZVOUS, Finding, Place, fail, ok, warning

_NO_CUDA = "built without CUDA"
_LONG_SECONDS = 3600.0
_HERE = "doctor/here"  # set by rank 0
_LOOK_SECONDS = 0.005  # between two polls for new ranks; on the others, before the second one
_CONNECT_SECONDS = 5.0  # for one attempt: a signal is heard between two
_KNOCK_SECONDS = 0.5  # at most, between two polls by a rank other than 0: hundreds of ranks connect to one port
_READING_SECONDS = 10.0  # for all ranks to read the verdict, before rank 0 may exit and the store with it

Check = Callable[[], None]


class RankDevice(NamedTuple):
    """A rank, its node and its accelerator."""

    node: str
    rank: int
    local_rank: int
    gpu: str | None  # unique identifier of the GPU; None: no GPU
    model: str  # of the GPU; "" for a CPU
    num_bytes: int  # of the GPU's memory
    num_visible: int  # GPUs that this rank sees
    missing: str | None  # without a GPU: why one is expected, and torch's message; None: none is expected

    @property
    def place(self) -> Place:
        return Place(self.node, self.rank)


class Rendezvous(NamedTuple):
    """Result of the rendezvous; it keeps the store alive."""

    findings: list[Finding]
    nodes: list[str]
    store: Any


def own_device() -> RankDevice:
    """Return the device of this rank. Its GPU is the one that `distributed.initialize` selects."""
    rank, _, local_rank, _ = read_ranks()
    place = (node_name(), rank, local_rank)
    if not torch.cuda.is_available():
        return RankDevice(*place, None, "", 0, 0, _why_gpu_is_missing())
    num_visible = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(local_rank % num_visible)
    return RankDevice(*place, str(properties.uuid), properties.name, properties.total_memory, num_visible, None)


def _why_gpu_is_missing() -> str | None:
    """Return why a GPU is expected, with torch's message; None if none is expected."""
    if gpus_are_hidden():
        return None
    if slurm_gave_gpus():
        reason = "Slurm has given this job GPUs"
    elif Path("/dev/nvidia0").exists():
        reason = "this node has a GPU"
    else:
        return None
    return f"{reason}; torch: {_torch_message()}"


def _torch_message() -> str:
    if torch.version.cuda is None:
        return _NO_CUDA
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "sees none"


def _go_on() -> None:
    """Let a wait go on."""


def wait_for_ranks(*, seconds: float, check: Check = _go_on) -> Rendezvous:
    """Wait for all ranks and compare their accelerators; every rank calls it, before `distributed.initialize`.

    Args:
        seconds: how long to wait for the next rank while some are missing; also how long other ranks wait for rank 0.
        check: called while this waits; raises what ends the wait, as a signal that was received.

    Raises:
        ValueError: a launcher's variables are incomplete.
    """
    ranks = read_ranks()
    rank, size, _, _ = ranks
    export_for_libraries(*ranks)
    raise_open_files(size)  # here: rank 0 keeps the store, to which every rank connects
    device = own_device()
    if size == 1:
        return Rendezvous(list(check_accelerators([device])), [device.node], None)
    host, port = rendezvous_address()
    try:
        store = open_store(host, port, rank=rank, seconds=seconds, check=check)
        return meet(store, device, size=size, seconds=seconds, check=check)
    except RunError:  # of the check
        raise
    except (RuntimeError, OSError) as error:  # from torch, from the network, or from `_wait_until_there`
        check()  # rank 0 has received the signal too, and has ended
        reason = str(error).partition("\n")[0]
        fix = (
            f"can {device.node} reach {host} there? name resolution, firewall; another job's port: set MASTER_PORT, in "
            "a job by launch.env=[MASTER_PORT=29500]"
        )
        remark = fail(
            RENDEZVOUS, f"no rendezvous at {describe_address(host, port)}: {reason}", fix, blames_node=rank != 0
        )
        return Rendezvous([remark.at(device.place)], [device.node], None)


def meet(store: Any, device: RankDevice, *, size: int, seconds: float, check: Check = _go_on) -> Rendezvous:
    """Meet the other ranks in a store; arguments and result as in `wait_for_ranks`. Raises RuntimeError."""
    store.set(f"doctor/device/{device.rank}", json.dumps(device))
    store.add("doctor/devices", 1)
    if device.rank == 0:
        return _decide(store, size, seconds, check)
    _wait_for_verdict(store, check)
    findings, nodes = json.loads(store.get("doctor/verdict"))
    store.add("doctor/readers", 1)
    found = [Finding(place and Place(*place), *rest) for place, *rest in findings]
    return Rendezvous(found, nodes, store)


def _wait_for_verdict(store: Any, check: Check) -> None:
    """Wait for rank 0, which decides how long to wait; if it exits, the store does not answer. Raises RuntimeError."""
    if not _wait_until(lambda: store.check(["doctor/verdict"]), _LONG_SECONDS, check):
        raise RuntimeError(f"rank 0 has not decided in {_LONG_SECONDS:,.0f} s")


def _wait_until(is_so: Callable[[], bool], seconds: float, check: Check) -> bool:
    """Wait until something is so, or for `seconds`; return whether it is.

    The pauses grow, because hundreds of ranks ask rank 0, or the launcher where it keeps the store.
    """
    deadline, pause = time.monotonic() + seconds, _LOOK_SECONDS
    while not is_so():
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _KNOCK_SECONDS)
    return True


def open_store(host: str, port: int, *, rank: int, seconds: float, check: Check = _go_on) -> Any:
    """Open the store of torch's rendezvous; torchrun or else rank 0 hosts it, and torch shares it (`multi_tenant`).

    Raises:
        RuntimeError: from torch, as for a port that is taken.
        OSError: nobody listens there, or the ranks of another job do.
    """
    is_master = rank == 0 and not agent_keeps_store()
    _wait_until_there(host, port, is_listening=not is_master, seconds=seconds, check=check)
    store = dist.TCPStore(
        host, port, is_master=is_master, timeout=timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
    )
    # torchrun's store outlives its ranks, and a port may be that of another job.
    own = dist.PrefixStore(f"start-{launcher_restarts()}{job_identity()}", store)
    if rank == 0:
        own.set(_HERE, "1")
    if not _wait_until(lambda: own.check([_HERE]), seconds, check):
        who = "the launcher's store answers" if agent_keeps_store() else "another job answers"
        raise OSError(f"{who}, but rank 0 of this job has not come for {seconds:g} s")
    return own


def _wait_until_there(host: str, port: int, *, is_listening: bool, seconds: float, check: Check) -> None:
    """Wait until the host name resolves and a server listens there: torch would print a C++ stack trace, twice.

    Raises:
        OSError: it did not happen within `seconds`.
    """
    errors: list[OSError] = []

    def is_there() -> bool:
        try:
            if is_listening:
                socket.create_connection((host, port), timeout=min(seconds, _CONNECT_SECONDS)).close()
            else:
                socket.getaddrinfo(host, port)
        except OSError as error:
            errors[:] = [error]
            return False
        return True

    if not _wait_until(is_there, seconds, check):
        who = "launcher" if agent_keeps_store() else "rank 0"
        text = f"nobody answers for {seconds:g} s, where {who} is expected" if is_listening else "no such host"
        raise OSError(f"{text} ({errors[0].strerror or errors[0]})") from errors[0]


def _decide(store: Any, size: int, seconds: float, check: Check) -> Rendezvous:
    """Read all devices, check them, and write the verdict; rank 0 calls it."""
    present = _wait_for_devices(store, size, seconds, check)
    devices = [RankDevice(*json.loads(store.get(f"doctor/device/{rank}"))) for rank in present]
    nodes = list(dict.fromkeys(device.node for device in devices))
    findings = [*_check_present(devices, size, seconds), *check_accelerators(devices)]
    store.set("doctor/verdict", json.dumps([findings, nodes]))
    deadline = time.monotonic() + _READING_SECONDS
    while store.add("doctor/readers", 0) < len(devices) - 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return Rendezvous(findings, nodes, store)


def _wait_for_devices(store: Any, size: int, seconds: float, check: Check) -> list[int]:
    """Return the ranks present, when all are, or when no other has come for `seconds`."""
    num_found, deadline = 0, time.monotonic() + seconds
    while num_found < size and time.monotonic() < deadline:
        check()
        time.sleep(_LOOK_SECONDS)
        if (found := store.add("doctor/devices", 0)) > num_found:
            num_found, deadline = found, time.monotonic() + seconds
    return [rank for rank in range(size) if store.check([f"doctor/device/{rank}"])]


def _check_present(devices: Sequence[RankDevice], size: int, seconds: float) -> Iterator[Finding]:
    """Yield a finding about the missing ranks; under Slurm, one for each node from which no rank has come."""
    missing = sorted(set(range(size)) - {device.rank for device in devices})
    nodes = list(dict.fromkeys(device.node for device in devices))
    if not missing:
        yield ok(RENDEZVOUS, f"{count_noun(size, 'rank')}, {count_noun(len(nodes), 'node')}").at(None)
        return
    absent = [node for node in slurm_nodes() if node not in nodes]
    problem = f"{len(missing)} of {size} ranks have not come, and no other has for {seconds:g} s: {some(missing)}"
    fix = f"look at what these ranks printed; those of {some(nodes, 4)} are here"
    fix += "; if they are only slow, raise watchdog.join_seconds"
    places: list[Place | None] = [Place(node) for node in absent]
    for place in places or [None]:
        yield fail(RENDEZVOUS, problem, fix, blames_node=place is not None).at(place)


def check_accelerators(devices: Sequence[RankDevice]) -> Iterator[Finding]:
    """Check that all ranks have a GPU if any has one, that none is shared, and that all are of one model."""
    with_gpu = [device for device in devices if device.gpu]
    if not with_gpu:
        yield from _check_cpus(devices)
        return
    problems = [*_check_missing(devices, len(with_gpu)), *_check_shared(with_gpu)]
    yield from problems
    models = {f"{device.model}, {device.num_bytes / 2**30:.0f} GiB" for device in with_gpu}
    if len(models) > 1:
        yield from _check_alike(with_gpu)
    if not problems:
        visible = sorted({device.num_visible for device in with_gpu})
        seen = " or ".join(map(str, visible))
        yield ok("accelerator", f"{len(with_gpu)} GPUs ({', '.join(sorted(models))}), each rank sees {seen}").at(None)


def _check_cpus(devices: Sequence[RankDevice]) -> Iterator[Finding]:
    for device in devices:
        if device.missing and "Slurm" in device.missing:
            yield _no_gpu(device, device.missing)
        elif device.missing:
            fix = "install torch for CUDA, or a driver that fits; CUDA_VISIBLE_DEVICES= says that CPUs are meant"
            yield warning("accelerator", f"trains on the CPU, but {device.missing}", fix).at(Place(device.node))
    if not any(device.missing for device in devices):
        yield ok("accelerator", "no GPU: trains on CPUs").at(None)


def _no_gpu(device: RankDevice, reason: str) -> Finding:
    if _NO_CUDA in reason:  # another node would not help
        fix = "install torch with CUDA (https://pytorch.org); CUDA_VISIBLE_DEVICES= says that CPUs are meant"
        return fail("torch", f"no GPU: {reason}", fix).at(Place(device.node))
    fix = f"look at nvidia-smi on {device.node}, drain or exclude it: --exclude={device.node}"
    return fail("accelerator", f"no GPU: {reason}", fix, blames_node=True).at(device.place)


def _check_missing(devices: Sequence[RankDevice], num_with_gpu: int) -> Iterator[Finding]:
    for device in devices:
        if not device.gpu:
            yield _no_gpu(device, device.missing or f"{num_with_gpu} other ranks have one")


def _check_shared(with_gpu: Sequence[RankDevice]) -> Iterator[Finding]:
    holders: dict[str | None, list[RankDevice]] = {}
    for device in with_gpu:
        holders.setdefault(device.gpu, []).append(device)
    for shared in holders.values():
        if len(shared) > 1:
            ranks = ", ".join(str(device.rank) for device in shared)
            seen, local = shared[0].num_visible, shared[0].local_rank
            fix = f"start at most {seen} ranks on a node, or let each see a GPU of its own: --gpus-per-node"
            if len({device.local_rank for device in shared}) == 1:
                fix = f"each of these ranks has LOCAL_RANK {local}: the launcher must number the ranks of a node"
            yield fail("GPU binding", f"ranks {ranks} have the same GPU, of {seen} that they see", fix).at(
                Place(shared[0].node)
            )


def _check_alike(with_gpu: Sequence[RankDevice]) -> Iterator[Finding]:
    """Yield a warning for each GPU that differs from the most common one."""
    kinds = [(device.model, device.num_bytes) for device in with_gpu]
    [(usual, _)] = Counter(kinds).most_common(1)
    for device, kind in zip(with_gpu, kinds, strict=True):
        if kind != usual:
            difference = (
                f"{kind[0]} with {kind[1] / 2**30:.0f} GiB, most have {usual[0]} with {usual[1] / 2**30:.0f} GiB"
            )
            yield warning("accelerator", difference, "all wait for the slowest: ask for one kind, --constraint").at(
                device.place
            )

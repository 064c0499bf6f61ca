"""Rendezvous of the ranks before they join: check that all are present and that each has its accelerator.

A node that has lost its GPU would join with gloo while the others wait for it with NCCL, for half an hour and without a
message. So every rank first writes an entry with its node and GPU to the store that torch will use too; rank 0 reads
the entries and writes its verdict.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_mem.runtime.environment import (
    agent_keeps_store,
    export_for_libraries,
    gpus_are_hidden,
    launcher_restarts,
    meeting_point,
    node_name,
    read_ranks,
    slurm_gave_gpus,
    slurm_nodes,
)
from dist_mem.runtime.findings import MEETING, Finding, Place, fail, ok, warning

_NO_CUDA = "built without CUDA"
_LONG = timedelta(hours=1)
_LOOK_SECONDS = 0.005  # between two polls for new ranks
_KNOCK_SECONDS = 0.5  # at most, between two attempts to reach rank 0: hundreds of ranks connect to one port
_READING_SECONDS = 10.0  # for all ranks to read the verdict, before rank 0 may exit and the store with it


class Seat(NamedTuple):
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


class Meeting(NamedTuple):
    """Result of the rendezvous; it keeps the store alive."""

    findings: list[Finding]
    nodes: list[str]
    store: Any


def own_seat() -> Seat:
    """Return the seat of this rank. Its GPU is the one that `distributed.initialize` selects."""
    rank, _, local_rank, _ = read_ranks()
    place = (node_name(), rank, local_rank)
    if not torch.cuda.is_available():
        return Seat(*place, None, "", 0, 0, _why_gpu_is_missing())
    num_visible = torch.cuda.device_count()
    facts = torch.cuda.get_device_properties(local_rank % num_visible)
    return Seat(*place, str(facts.uuid), facts.name, facts.total_memory, num_visible, None)


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


def meet(*, seconds: float) -> Meeting:
    """Wait for all ranks and compare their accelerators; every rank calls it, before `distributed.initialize`.

    Args:
        seconds: how long to wait for the next rank while some are missing; also how long other ranks wait for rank 0.

    Raises:
        ValueError: a launcher's variables are incomplete.
    """
    ranks = read_ranks()
    rank, size, _, _ = ranks
    export_for_libraries(*ranks)
    seat = own_seat()
    if size == 1:
        return Meeting(list(check_accelerators([seat])), [seat.node], None)
    host, port = meeting_point()
    try:
        store = _open_store(host, port, rank=rank, seconds=seconds)
        store.set(f"doctor/seat/{rank}", json.dumps(seat))
        store.add("doctor/seats", 1)
        if rank == 0:
            return _decide(store, size, seconds)
        store.wait(["doctor/verdict"], _LONG)  # rank 0 decides how long to wait; if it exits, the wait fails
        verdict = _unpacked(store.get("doctor/verdict"), store)
        store.add("doctor/readers", 1)
        return verdict
    except (RuntimeError, OSError) as error:  # from torch, from the network, or from `_wait_until_there`
        reason = str(error).partition("\n")[0]
        fix = f"can {seat.node} reach {host} there? name resolution, firewall; another job's port: set MASTER_PORT"
        remark = fail(MEETING, f"no meeting at {host}:{port}: {reason}", fix, blames_node=rank != 0)
        return Meeting([remark.at(seat.place)], [seat.node], None)


def _open_store(host: str, port: int, *, rank: int, seconds: float) -> Any:
    """Open the store of torch's rendezvous; torchrun or else rank 0 hosts it, and torch shares it (`multi_tenant`)."""
    is_master = rank == 0 and not agent_keeps_store()
    _wait_until_there(host, port, is_listening=not is_master, seconds=seconds)
    store = dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"start-{launcher_restarts()}", store)  # torchrun's store outlives its ranks


def _wait_until_there(host: str, port: int, *, is_listening: bool, seconds: float) -> None:
    """Wait until the host name resolves and a server listens there: torch would print a C++ stack trace, twice.

    Raises:
        OSError: it did not happen within `seconds`.
    """
    deadline, pause = time.monotonic() + seconds, _LOOK_SECONDS
    while True:
        try:
            if is_listening:
                socket.create_connection((host, port), timeout=max(seconds, _KNOCK_SECONDS)).close()
            else:
                socket.getaddrinfo(host, port)
            return
        except OSError as error:
            if time.monotonic() + pause > deadline:
                who = "launcher" if agent_keeps_store() else "rank 0"
                text = f"nobody answers for {seconds:g} s, where {who} is expected" if is_listening else "no such host"
                raise OSError(f"{text} ({error.strerror or error})") from error
        time.sleep(pause)
        pause = min(2 * pause, _KNOCK_SECONDS)


def _decide(store: Any, size: int, seconds: float) -> Meeting:
    """Read all seats, check them, and write the verdict; rank 0 calls it."""
    present = _wait_for_seats(store, size, seconds)
    seats = [Seat(*json.loads(store.get(f"doctor/seat/{rank}"))) for rank in present]
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    findings = [*_check_present(seats, size, seconds), *check_accelerators(seats)]
    store.set("doctor/verdict", json.dumps([findings, nodes]))
    deadline = time.monotonic() + _READING_SECONDS
    while store.add("doctor/readers", 0) < len(seats) - 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return Meeting(findings, nodes, store)


def _wait_for_seats(store: Any, size: int, seconds: float) -> list[int]:
    """Return the ranks present, when all are, or when no other has come for `seconds`."""
    num_seats, deadline = 0, time.monotonic() + seconds
    while num_seats < size and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        if (found := store.add("doctor/seats", 0)) > num_seats:
            num_seats, deadline = found, time.monotonic() + seconds
    return [rank for rank in range(size) if store.check([f"doctor/seat/{rank}"])]


def _unpacked(text: bytes, store: Any) -> Meeting:
    findings, nodes = json.loads(text)
    return Meeting([Finding(place and Place(*place), *rest) for place, *rest in findings], nodes, store)


def _check_present(seats: Sequence[Seat], size: int, seconds: float) -> Iterator[Finding]:
    """Yield a finding about the missing ranks; under Slurm, one for each node from which no rank has come."""
    missing = sorted(set(range(size)) - {seat.rank for seat in seats})
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    if not missing:
        yield ok(MEETING, f"{size} ranks, {len(nodes)} node{'s' if len(nodes) > 1 else ''}").at(None)
        return
    absent = [node for node in slurm_nodes() if node not in nodes]
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    problem = f"{len(missing)} of {size} ranks have not come, and no other has for {seconds:g} s: {listed}"
    fix = f"look at what these ranks printed; those of {', '.join(nodes[:4])} are here"
    fix += "; if they are only slow, raise watchdog.join_seconds"
    places: list[Place | None] = [Place(node) for node in absent]
    for place in places or [None]:
        yield fail(MEETING, problem, fix, blames_node=place is not None).at(place)


def check_accelerators(seats: Sequence[Seat]) -> Iterator[Finding]:
    """Check that all ranks have a GPU if any has one, that none is shared, and that all are of one model."""
    with_gpu = [seat for seat in seats if seat.gpu]
    if not with_gpu:
        yield from _check_cpus(seats)
        return
    problems = [*_check_missing(seats, len(with_gpu)), *_check_shared(with_gpu)]
    yield from problems
    models = {f"{seat.model}, {seat.num_bytes / 2**30:.0f} GiB" for seat in with_gpu}
    if len(models) > 1:
        yield from _check_alike(with_gpu)
    if not problems:
        visible = sorted({seat.num_visible for seat in with_gpu})
        seen = " or ".join(map(str, visible))
        yield ok("accelerator", f"{len(with_gpu)} GPUs ({', '.join(sorted(models))}), each rank sees {seen}").at(None)


def _check_cpus(seats: Sequence[Seat]) -> Iterator[Finding]:
    for seat in seats:
        if seat.missing and "Slurm" in seat.missing:
            yield _no_gpu(seat, seat.missing)
        elif seat.missing:
            fix = "install torch for CUDA, or a driver that fits; CUDA_VISIBLE_DEVICES= says that CPUs are meant"
            yield warning("accelerator", f"trains on the CPU, but {seat.missing}", fix).at(Place(seat.node))
    if not any(seat.missing for seat in seats):
        yield ok("accelerator", "no GPU: trains on CPUs").at(None)


def _no_gpu(seat: Seat, reason: str) -> Finding:
    if _NO_CUDA in reason:  # another node would not help
        fix = "install torch with CUDA (https://pytorch.org); CUDA_VISIBLE_DEVICES= says that CPUs are meant"
        return fail("torch", f"no GPU: {reason}", fix).at(Place(seat.node))
    fix = f"look at nvidia-smi on {seat.node}, drain or exclude it: --exclude={seat.node}"
    return fail("accelerator", f"no GPU: {reason}", fix, blames_node=True).at(seat.place)


def _check_missing(seats: Sequence[Seat], num_with_gpu: int) -> Iterator[Finding]:
    for seat in seats:
        if not seat.gpu:
            yield _no_gpu(seat, seat.missing or f"{num_with_gpu} other ranks have one")


def _check_shared(with_gpu: Sequence[Seat]) -> Iterator[Finding]:
    holders: dict[str | None, list[Seat]] = {}
    for seat in with_gpu:
        holders.setdefault(seat.gpu, []).append(seat)
    for shared in holders.values():
        if len(shared) > 1:
            ranks = ", ".join(str(seat.rank) for seat in shared)
            seen, local = shared[0].num_visible, shared[0].local_rank
            fix = f"start at most {seen} ranks on a node, or let each see a GPU of its own: --gpus-per-node"
            if len({seat.local_rank for seat in shared}) == 1:
                fix = f"each of these ranks has LOCAL_RANK {local}: the launcher must number the ranks of a node"
            yield fail("GPU binding", f"ranks {ranks} have the same GPU, of {seen} that they see", fix).at(
                Place(shared[0].node)
            )


def _check_alike(with_gpu: Sequence[Seat]) -> Iterator[Finding]:
    """Yield a warning for each GPU that differs from the most common one."""
    kinds = [(seat.model, seat.num_bytes) for seat in with_gpu]
    usual = max(kinds, key=kinds.count)
    for seat, kind in zip(with_gpu, kinds, strict=True):
        if kind != usual:
            difference = (
                f"{kind[0]} with {kind[1] / 2**30:.0f} GiB, most have {usual[0]} with {usual[1] / 2**30:.0f} GiB"
            )
            yield warning("accelerator", difference, "all wait for the slowest: ask for one kind, --constraint").at(
                seat.place
            )

"""Checks that need all ranks: correct sums, connections with rank 0, and network speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from dist_mem.errors import RunError
from dist_mem.runtime.distributed import World
from dist_mem.supervision.findings import Finding, Place, Remark, fail, ok
from dist_mem.supervision.side_channel import open_side_channel

SIZES = (1, 1000, 300_000)  # float32 numbers; covers a backend's algorithms for small and large messages
_MEGABYTES = (1, 16, 64)


def wrong_sums(world: World, sizes: Sequence[int] = SIZES) -> list[int]:
    """All-reduce numbers with a known sum; collective, every rank calls it.

    Number i is `i % world size + 1` on rank `i % world size` and 0 on all others, so a wrong sum identifies its rank.

    Returns:
        The ranks whose numbers this rank received incorrectly.
    """
    wrong: set[int] = set()
    for size in sizes:
        owner = torch.arange(size, device=world.device) % world.size
        expected = (owner + 1).float()
        numbers = torch.where(owner == world.rank, expected, torch.zeros_like(expected))
        dist.all_reduce(numbers)
        wrong |= set(owner[numbers != expected].tolist())
    return sorted(wrong)


def check_sums(places: Sequence[Place], wrong: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """Yield the rank that sent wrong numbers, or those that received them; arguments in rank order."""
    if not any(wrong):
        largest = f"up to {SIZES[-1]:,} numbers"
        yield ok("all-reduce", f"sums over all {len(places)} ranks are right, {largest}").at(None)
        return
    senders = set.intersection(*map(set, wrong))
    fix = "leave this node out: --exclude; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 show which path is at fault"
    if len(senders) == 1:
        text = "all ranks got a wrong sum of the numbers of this rank"
        yield fail("all-reduce", text, fix, blames_node=True).at(places[senders.pop()])
        return
    for place, ranks in zip(places, wrong, strict=True):
        if ranks:
            text = f"got wrong sums of the numbers of {len(ranks)} of {len(places)} ranks"
            yield fail("all-reduce", text, fix, blames_node=True).at(place)


def check_connections(world: World) -> Iterator[Remark]:
    """Connect every rank with rank 0 as a run does for its saves; collective, rank 0 yields the result."""
    try:
        open_side_channel(world).close()
    except RunError as error:
        if world.rank == 0:
            yield fail("connections", str(error), "look at MASTER_ADDR (launch.env sets it in a job) and at firewalls")
        return
    if world.rank == 0 and world.size > 1:
        yield ok("connections", "every rank reaches rank 0")


def check_speed(world: World) -> Iterator[Remark]:
    """Time all-reduces; every rank calls it, rank 0 yields the result."""
    times = [_time_all_reduce(world, 1, repeats=20)]
    for megabytes in _MEGABYTES:
        times.append(_time_all_reduce(world, megabytes << 18, repeats=3))
    if world.rank == 0 and world.size > 1:
        yield ok("latency", f"{times[0] * 1e6:,.0f} us for an all-reduce of one number")
        pairs = zip(_MEGABYTES, times[1:], strict=True)
        rates = ", ".join(f"{size} MB {(size << 20) / seconds / 1e9:.2f}" for size, seconds in pairs)
        yield ok("bandwidth", f"GB/s of all-reduces: {rates}")


def _time_all_reduce(world: World, size: int, *, repeats: int) -> float:
    """Return the median seconds of an all-reduce of `size` float32 numbers."""
    numbers = torch.zeros(size, device=world.device)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        numbers[0].item()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one includes connecting

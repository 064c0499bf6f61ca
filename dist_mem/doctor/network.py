"""Checks that need all ranks: correct sums, network speed, and agreement of the nodes' clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_mem.errors import RunError
from dist_mem.runtime.distributed import World
from dist_mem.supervision.findings import Finding, Place, Remark, fail, ok, warning
from dist_mem.supervision.side_channel import open_side_channel

SIZES = (1, 1000, 300_000)  # float32 numbers; covers a backend's algorithms for small and large messages
_MEGABYTES = (1, 16, 64)
_PAIR_BYTES = 16 << 20
_SLOW_SHARE = 1 / 3  # a pair slower than this share of the median speed is reported
_SKEW_SECONDS = 5.0
_ROUNDS = 5

Interval = tuple[float, float]  # this node's time before and after a collective operation


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


def read_clocks(world: World, clock: Callable[[], float] = time.time) -> list[Interval]:
    """Return this rank's time before and after a few all-reduces; collective, every rank calls it.

    No all-reduce ends before the last rank has begun it, so each "before" precedes every "after", whatever the clocks.
    """
    intervals = []
    for _ in range(_ROUNDS):
        token = torch.zeros(1, device=world.device)
        before = clock()
        dist.all_reduce(token)
        token.item()  # wait for the GPU
        intervals.append((before, clock()))
    return intervals


def skew(first: Sequence[Interval], other: Sequence[Interval]) -> tuple[float, float]:
    """Return by how many seconds the other clock is ahead of the first, and the uncertainty (plus or minus)."""
    bounds = [(there[0] - here[1], there[1] - here[0]) for here, there in zip(first, other, strict=True)]
    low, high = min(bounds, key=lambda bound: bound[1] - bound[0])
    return (low + high) / 2, (high - low) / 2


def check_clocks(places: Sequence[Place], clocks: Sequence[Sequence[Interval]]) -> Iterator[Finding]:
    """Compare the clocks with rank 0's; arguments in rank order."""
    largest, unsure = 0.0, 0.0
    for place, intervals in zip(places[1:], clocks[1:], strict=True):
        ahead, margin = skew(clocks[0], intervals)
        largest, unsure = max(largest, abs(ahead)), max(unsure, margin)
        if abs(ahead) > _SKEW_SECONDS + margin:
            text = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {places[0].node}"
            fix = "chronyc makestep, or inform the site: the clock determines the end of a job"
            yield warning("clock", text, fix).at(Place(place.node))
    if len(places) > 1 and largest <= _SKEW_SECONDS:
        yield ok("clock", f"nodes differ by at most {largest * 1000:.1f} ms (+- {unsure * 1000:.1f})").at(None)


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


class PairSpeed(NamedTuple):
    """The speed between two ranks."""

    ranks: tuple[int, int]
    rate: float  # bytes per second


def measure_pairs(world: World) -> list[PairSpeed]:
    """Exchange numbers with the ranks at distance 1, 2, 4, ... (XOR), all pairs in parallel; every rank calls it.

    A few rounds measure each rank with several others, so a slow rank can be identified.
    """
    found = []
    outgoing = torch.zeros(_PAIR_BYTES // 4, device=world.device)
    incoming = torch.zeros_like(outgoing)
    distance = 1
    while distance < world.size:
        partner = world.rank ^ distance
        if partner < world.size:
            times = [_exchange(outgoing, incoming, partner) for _ in range(3)]
            pair = (min(world.rank, partner), max(world.rank, partner))
            found.append(PairSpeed(pair, _PAIR_BYTES / min(times[1:])))
        dist.barrier()
        distance *= 2
    return found


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> float:
    began = time.perf_counter()
    sends = [dist.P2POp(dist.isend, outgoing, partner), dist.P2POp(dist.irecv, incoming, partner)]
    for request in dist.batch_isend_irecv(sends):
        request.wait()
    incoming[0].item()
    return time.perf_counter() - began


def check_pairs(places: Sequence[Place], measured: Sequence[Sequence[PairSpeed]]) -> Iterator[Finding]:
    """Yield the slowest pair, and the rank of it that is slow with all its partners; arguments in rank order.

    Pairs on one node are compared with each other, pairs between nodes with each other.
    """
    for is_inside, what in ((True, "ranks of a node"), (False, "nodes")):
        speeds = {
            pair.ranks: pair.rate
            for pairs in measured
            for pair in pairs
            if (places[pair.ranks[0]].node == places[pair.ranks[1]].node) == is_inside
        }
        if speeds:
            yield _judge(places, speeds, what)


def _judge(places: Sequence[Place], speeds: dict[tuple[int, int], float], what: str) -> Finding:
    usual = statistics.median(speeds.values())
    (first, second), slowest = min(speeds.items(), key=lambda item: item[1])
    text = f"between {what}: {usual / 1e9:.2f} GB/s, slowest {slowest / 1e9:.2f}"
    if slowest >= usual * _SLOW_SHARE:
        return ok("pairs", f"{text} (ranks {first} and {second})").at(None)

    def best(rank: int) -> float:
        return max(rate for pair, rate in speeds.items() if rank in pair)

    slow = first if best(first) < best(second) else second
    other = second if slow == first else first
    fix = "check its links and other jobs there, or leave the node out: --exclude"
    return warning("pairs", f"{text} with {places[other]}", fix).at(places[slow])

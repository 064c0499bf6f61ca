"""The side channel: one connection per rank, the same decision everywhere, and a rank that has ended is named."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError
from dist_mem.config.check import Problem
from dist_mem.errors import RunError, TakenOverError, UnfitError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.files import WrongFileError
from dist_mem.runtime.network_interface import describe_address
from dist_mem.supervision.side_channel import SideChannel, accept_all, call, listen, open_side_channel
from tests.support.limits import limit
from tests.support.loopbacks import LOOPBACKS
from tests.support.messages import described, refused, said
from tests.support.ranks import Pools

SIZE = 6


@contextmanager
def channels(
    size: int = SIZE, seconds: float = 60.0, host: str = "127.0.0.1"
) -> Iterator[tuple[list[SideChannel], ThreadPoolExecutor]]:
    """Yield the channels of all ranks, in threads of this process."""
    server, hub = listen(size)

    def connect(rank: int) -> SideChannel:
        peers = call(hub, host, rank) if rank else accept_all(server, hub, size)
        return SideChannel(peers, rank=rank, size=size, seconds=seconds)

    with server, ThreadPoolExecutor(size) as threads:
        opened = list(threads.map(connect, range(size)))
        yield opened, threads
        for channel in opened:
            channel.close()


def vote(
    opened: list[SideChannel],
    threads: ThreadPoolExecutor,
    decide: Callable[[list[Any]], Any],
    without: int | None = None,
) -> list[Any]:
    """Let all ranks vote with ten times their number; return results, or errors as texts."""

    def of_rank(rank: int) -> Any:
        try:
            return opened[rank].decide_on_rank0(10 * rank, decide)
        except RunError as error:
            return described(error)

    return list(threads.map(of_rank, [rank for rank in range(len(opened)) if rank != without]))


def fail(error: Exception) -> Callable[[list[Any]], Any]:
    def decide(values: list[Any]) -> Any:
        raise error

    return decide


def test_every_rank_gets_the_decision_of_rank_0_on_the_values_in_rank_order() -> None:
    with channels() as (opened, threads):
        assert vote(opened, threads, lambda values: values) == [[0, 10, 20, 30, 40, 50]] * SIZE
        taken_over = TakenOverError("another job")
        assert vote(opened, threads, fail(taken_over)) == [described(taken_over)] * SIZE
        assert vote(opened, threads, fail(KeyError("x"))) == ["UnfitError, exit code 1: KeyError: 'x'"] * SIZE
        assert vote(opened, threads, sum) == [150] * SIZE, "an error of a decision does not end the channel"
    assert SideChannel({}, rank=0, size=1).decide_on_rank0(7, sum) == 7, "alone, without a connection"


@pytest.mark.parametrize("host", [*LOOPBACKS, "localhost", "the host's own name"])
def test_every_address_of_rank_0_s_host_leads_to_it(host: str) -> None:
    with channels(3, host=host if " " not in host else socket.gethostname()) as (opened, threads):
        assert vote(opened, threads, sum) == [30] * 3


def test_connections_grow_with_the_number_of_ranks_and_not_with_its_square() -> None:
    def num_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def num_open(size: int) -> int:
        before = num_files()
        with channels(size):
            return num_files() - before

    few, many = num_open(4), num_open(16)
    assert many - few == 2 * (16 - 4), "both ends of one connection for every further rank"


@pytest.mark.parametrize(
    "error", [WrongFileError(21, "a folder", "lease.json"), ConfigError([Problem("a.b", "wrong")])]
)
def test_an_error_of_more_than_a_text_keeps_its_words(error: Exception) -> None:
    """It was rebuilt from its text alone: `None: None`, and one letter per line."""

    def fail(values: list[Any]) -> None:
        raise error

    with channels(3) as (opened, threads):
        found = vote(opened, threads, fail)
    assert len(set(found)) == 1 and str(error) in found[0]


def test_a_rank_that_has_ended_is_named_on_all_others_and_stays_out() -> None:
    with channels() as (opened, threads):
        assert vote(opened, threads, sum) == [150] * SIZE
        opened[4].close()
        for _ in range(2):
            reported = vote(opened, threads, sum, without=4)
            assert reported == reported[:1] * (SIZE - 1)
            said(reported[0], "UnfitError", "rank 4")


def test_the_end_of_rank_0_and_a_silence_that_it_hears_are_errors() -> None:
    with channels(2) as (opened, _):
        opened[0].close()
        with refused(UnfitError, "rank 0 has ended"):
            opened[1].decide_on_rank0(1, sum)
    with (
        channels(2, seconds=0.1) as (opened, _),
        pytest.raises(UnfitError, match=r"rank 1 has sent nothing for 0\.1 s"),
    ):
        opened[0].decide_on_rank0(1, sum)


def test_a_rank_gets_the_decision_however_late_rank_0_is() -> None:
    """Only rank 0 times a vote: a rank that gave up would miss what the others have decided."""
    with channels(2, seconds=0.2) as (opened, threads):
        waiting = threads.submit(opened[1].decide_on_rank0, 10, sum)
        time.sleep(0.5)  # longer than the limit of a vote
        assert opened[0].decide_on_rank0(0, sum) == 10
        assert waiting.result(limit(10)) == 10


def test_a_stranger_that_connects_is_no_rank() -> None:
    """As a port scan does, or a rank of another job."""
    server, hub = listen(2)
    with server, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(accept_all, server, hub, 2)
        for hello in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(20)):
            with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
                stranger.sendall(hello)
        peers = call(hub, "127.0.0.1", 1)
        assert list(accepted.result()) == [1]
        peers[0].close()


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_connection_that_is_refused_names_the_addresses_tried_and_no_firewall(host: str) -> None:
    server, hub = listen(2)
    server.close()
    with refused(OSError, describe_address(host, hub.port), "MASTER_ADDR", "node1") as error:
        call(hub._replace(node="node1", families="IPv4 only"), host, 1)
    assert "firewall" not in str(error.value)


def open_and_close(world: World) -> None:
    for _ in range(30):
        open_side_channel(world).close()


def test_a_side_channel_can_be_closed_at_once(rank_pool: Pools) -> None:
    """As by a job that has nothing left to train: a slower rank must not be cut off while it connects."""
    rank_pool(2).run(open_and_close)

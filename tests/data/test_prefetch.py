"""The reading thread: bounded, honest about errors, gone when closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dist_mem.data.prefetch import Prefetcher
from dist_mem.data.shard import ShardError
from tests.support.lane_corpus import make_split, reader_of
from tests.support.limits import limit
from tests.support.messages import refused


def test_closing_early_leaves_no_thread(tmp_path: Path) -> None:
    index = make_split(tmp_path)
    before = set(threading.enumerate())
    with reader_of(index, prefetch=2) as reader:
        next(reader)
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before
    reader.close()
    with refused(RuntimeError):
        next(reader)


def test_the_prefetcher_reads_ahead_by_its_depth_and_no_more() -> None:
    depth, asked = 3, 0
    ahead: list[int] = []
    filled = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(100):
            ahead.append(number - asked)
            if number == depth:  # that many wait to be read, and the thread holds this one
                filled.set()
            yield number

    with closing(Prefetcher(numbers(), depth=depth)) as items:
        assert filled.wait(limit(10))
        for number in range(100):
            asked += 1
            assert next(items) == number
        with pytest.raises(StopIteration):
            next(items)
    assert max(ahead) == depth


def test_what_was_read_before_an_error_is_still_delivered() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise ShardError("broken")

    with closing(Prefetcher(numbers(), depth=8)) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with refused(ShardError):
                next(items)

"""Hang reports of many ranks: one rank reads the files, and the time that it has for it grows with their number."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dist_mem.supervision import hang_report
from dist_mem.supervision.hang_report import Position, gather_positions, write_position

SIZE = 24


def gather(folder: Path, live: Sequence[int]) -> dict[int, list[int]]:
    """Let every live rank write its position and gather; return the ranks whose positions each of them got."""

    def of_rank(rank: int) -> list[int]:
        write_position(folder, Position(rank, "node0", 1, 7, "backward", 90, 600.0))
        return [position.rank for position in gather_positions(folder, rank=rank, num_ranks=SIZE)]

    with ThreadPoolExecutor(len(live)) as ranks:
        return dict(zip(live, ranks.map(of_rank, live), strict=True))


@pytest.mark.parametrize("silent", [[5], [0, 1, 2, 9]])
def test_only_the_lowest_live_rank_reads_the_files(
    tmp_path: Path, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report, "_GATHER_SECONDS", 0.5)
    read_positions, num_readers = hang_report.read_positions, 0

    def read(folder: Path) -> list[Position]:
        nonlocal num_readers
        num_readers += 1
        return read_positions(folder)

    monkeypatch.setattr(hang_report, "read_positions", read)
    live = [rank for rank in range(SIZE) if rank not in silent]
    assert gather(tmp_path, live) == {live[0]: live, **{rank: [] for rank in live[1:]}}
    assert num_readers == 1

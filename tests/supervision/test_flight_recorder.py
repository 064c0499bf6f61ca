"""The recorder of collectives names the rank that the others wait for: real records of gloo, made-up ones of NCCL."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_mem.runtime.distributed import World
from dist_mem.supervision import flight_recorder
from dist_mem.supervision.flight_recorder import read_verdict, save
from dist_mem.supervision.hang_report import Position, report, suspects
from tests.support.limits import wait_until
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


def _save(world: World, folder: Path, *, pending: int) -> None:
    """Write the recorder once so many collectives are unfinished: gloo's thread retires them after `wait` returns."""

    def has_that_many() -> bool:
        save(folder, world.rank)
        entries = json.loads((folder / f"collectives-{world.rank:05d}.json").read_text())["gloo"]["entries"]
        return [entry["retired"] for entry in entries].count(False) == pending

    wait_until(has_that_many, f"{pending} unfinished collectives")


def _wait_for_rank_1(world: World, folder: Path) -> None:
    """Ranks 0 and 2 wait in an all-reduce when the recorders are written; rank 1 joins it afterwards."""
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
    work = dist.all_reduce(torch.ones(7), async_op=True) if world.rank != 1 else None
    _save(world, folder, pending=int(world.rank != 1))
    (folder / f"written-{world.rank}").touch()
    wait_until(lambda: len(list(folder.glob("written-*"))) == world.size, "all files")
    if work is None:
        dist.all_reduce(torch.ones(7))
    else:
        work.wait()
    dist.barrier()


def test_rank_that_has_not_joined_is_named_from_real_records(
    tmp_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    rank_pool(3).run(_wait_for_rank_1, tmp_path)
    verdict = read_verdict(tmp_path)
    assert list(verdict.suspects) == [1]
    assert "has not reached collective " in verdict.suspects[1]
    assert "gloo:all_reduce of 7 Float" in verdict.suspects[1]
    (line,) = verdict.lines
    assert "which rank 1 has not reached" in line


def _finished(world: World, folder: Path) -> None:
    for _ in range(40):
        dist.all_reduce(torch.ones(5))
    dist.barrier()
    _save(world, folder, pending=0)


def test_nobody_is_named_where_all_is_complete_and_files_stay_small(
    tmp_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    rank_pool(2).run(_finished, tmp_path)
    assert read_verdict(tmp_path) == flight_recorder.NO_VERDICT
    kept = json.loads((tmp_path / "collectives-00000.json").read_text())["gloo"]["entries"]
    assert len([entry for entry in kept if entry["process_group"][0] == "0"]) <= flight_recorder._KEPT


# NCCL's records: the states that a device reports, which no CPU has.


def entry(number: int, state: str = "completed", *, size: int = 1024, operation: str = "all_reduce") -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [[size]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed",
    }


def verdict_of(
    folder: Path, ranks: Sequence[Sequence[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> flight_recorder.Verdict:
    for rank, entries in enumerate(ranks):
        dump = json.dumps({"entries": entries})
        monkeypatch.setattr(flight_recorder, "_recorders", lambda dump=dump: {"nccl": lambda: dump})
        save(folder, rank)
    return read_verdict(folder)


DONE = [entry(number) for number in range(1, 41)]
WAITS = [*DONE, entry(41, "started"), entry(42, "scheduled")]
WHAT = "collective 41 of nccl group 0 (default_pg), nccl:all_reduce of 1,024 BFloat16"
CASES = {
    "has not reached": DONE,
    "is in another one than": [*DONE, entry(41, "started", operation="broadcast")],
    "has not started on its device": [*DONE, entry(41, "scheduled"), entry(42, "scheduled")],
}


@pytest.mark.parametrize("reason", CASES)
def test_device_that_lags_is_named(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code of rank 2 has run ahead as that of the others; only its device has not."""
    verdict = verdict_of(tmp_path, [WAITS, WAITS, CASES[reason], WAITS], monkeypatch)
    assert verdict.suspects == {2: f"{reason} {WHAT}"}
    assert verdict.lines == [f"  waiting in {WHAT}, which rank 2 {reason}"]
    positions = [Position(rank, f"node{rank}", 1, 7, "agreeing", 90, 600.2) for rank in range(4)]
    nodes = [f"node{rank}" for rank in range(4)]
    assert suspects(positions, nodes) == {}, "the progress marks name nobody"
    text = report(positions, nodes, seconds=600, folder=tmp_path, recorded=verdict)
    assert f"suspect: rank 2 (node2) {reason} collective 41" in text


@pytest.mark.parametrize(
    ("of_last", "others"),
    [(WAITS, ""), ([*DONE, entry(41, "started", size=2048)], "; 1 ranks in nccl:all_reduce of 2,048 BFloat16")],
    ids=["the network", "two collectives"],
)
def test_nobody_is_blamed_if_all_devices_wait_or_as_many_here_as_there(
    of_last: list[dict[str, Any]], others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(tmp_path, [WAITS, of_last], monkeypatch)
    assert verdict == flight_recorder.Verdict({}, [f"  waiting in {WHAT}: no rank stands out{others}"])


def test_file_stays_small_however_far_a_rank_has_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [*DONE, *(entry(number, "scheduled") for number in range(41, 341))]
    further = [*ahead, entry(341, "scheduled")]
    verdict = verdict_of(tmp_path, [further, ahead, DONE], monkeypatch)
    assert list(verdict.suspects) == [2]
    assert "collective 41 " in verdict.suspects[2]
    kept = json.loads((tmp_path / "collectives-00000.json").read_text())["nccl"]["entries"]
    numbers = [one["collective_seq_id"] for one in kept]
    assert numbers == [*range(33, 49), 341], "with the one that its Python code has reached"

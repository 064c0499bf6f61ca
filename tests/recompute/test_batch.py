"""`dist-mem batch` shows what the Feed delivered, over world sizes, layouts, skipped updates and rollbacks."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError
from dist_mem.errors import UnusableError
from dist_mem.recompute.batch import read_step, run
from dist_mem.training.history import HISTORY
from tests.support.jobs import train_here, write_config
from tests.support.messages import refused
from tests.support.ranks import Pools
from tests.support.recording import Delivered, assert_as_delivered, train_recording


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"layout": "documents"}, "train": {"segments_per_update": 2}},
        {"data": {"layout": "documents", "cut": "end"}, "memory": {"kind": "none"}},
        {"data": {"layout": "stream", "blocks": True}},
    ],
    ids=["documents", "cut from the end", "stream in blocks"],
)
def test_every_step_is_as_delivered_on_2_then_3_then_1_ranks(
    tmp_path: Path, books: Path, rank_pool: Pools, changes: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path / "run.yaml",
        books,
        run_dir,
        {"schedule": {"kind": "constant"}, "checkpoint": {"every": 2}},
        {"divergence": {"action": "skip"}},
        changes,
        memory=changes.get("memory", {"kind": "transformer_xl", "mem_len": 16}),
    )
    delivered: dict[int, list[Delivered]] = {}
    for ranks, last in ((2, 5), (3, 9), (1, 12)):
        found = rank_pool(ranks).run(train_recording, config, [f"train.steps={last}"], 4)
        delivered |= dict.fromkeys(found[0], found)
    assert sorted(delivered) == list(range(1, 13))
    for step, of_ranks in delivered.items():
        assert_as_delivered(run_dir, step, of_ranks)
    kept = run_dir / "checkpoints" / "step-00000002"
    for directory in kept.parent.glob("step-*"):
        if directory != kept:
            shutil.rmtree(directory)
    assert_as_delivered(run_dir, 11, delivered[11])  # far from the only checkpoint that retention has left
    shutil.rmtree(kept)
    assert_as_delivered(run_dir, 7, delivered[7])  # from the beginning


def test_a_rolled_back_step_is_as_delivered_the_last_time(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    run_dir = tmp_path / "run"
    changes = {"divergence": {"action": "rollback"}, "train": {"steps": 9}, "checkpoint": {"every": 3}}
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"schedule": {"kind": "constant"}}, changes)
    delivered = rank_pool(2).run(train_recording, config, [], 5)
    for step in delivered[0]:
        assert_as_delivered(run_dir, step, delivered)


@pytest.fixture
def run_dir(tmp_path: Path, books: Path, rank_pool: Pools) -> Path:
    changes = {
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "segments_per_update": 2},
        "tracking": {"every": 2},
    }
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    assert rank_pool(2).run(train_here, config) == [0, 0]
    return tmp_path / "run"


def test_the_command_prints_documents_positions_and_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(run_dir, 2, rank=1, full=True) == 0
    text = capsys.readouterr().out
    assert "step 2: 4 lanes x 2 segments of 16 tokens, on 2 ranks; train of tiny" in text
    assert "at step 2, mean of steps 1 to 2" in text
    assert f"dist-mem recompute {run_dir} --step 2" in text
    read = read_step(run_dir, 2)
    shown = [lane for lane in read.lanes if lane.rank == 1]
    assert [lane.lane for lane in shown] == [2, 3]
    assert "rank 0" not in text
    for lane in shown:
        for number, segment in zip(lane.micro_batches, lane.segments, strict=True):
            assert f"lane {lane.lane}, micro-batch {number}: document {segment.document} (" in text
            assert f"    {read.tokenizer.decode(segment.tokens[1:])}\n".replace("\n", "\\n")[:-2] in text
    assert "tokens 32 to 47 of" in text


def test_what_cannot_be_shown_is_refused(run_dir: Path) -> None:
    with refused(UnusableError, "--step 4"):
        read_step(run_dir, 4)
    with refused(UnusableError, "--rank 2"):
        run(run_dir, 1, rank=2)
    with refused(UnusableError, "train.global_batch_size", "data.path"):
        read_step(run_dir, 1, ["train.global_batch_size=8"])
    history = run_dir / HISTORY
    whole = history.read_text(encoding="utf-8")
    for steps in ("null", "many"):
        history.write_text(re.sub(r"\bsteps: 3\b", f"steps: {steps}", whole), encoding="utf-8")
        with refused(ConfigError, f"{history}, config of step ", "train.steps"):
            read_step(run_dir, 1)
    history.unlink()
    with refused(UnusableError, "history.jsonl"):
        read_step(run_dir, 1)

"""`dist-mem batch` shows what the Feed delivered, over world sizes, layouts, skipped updates and rollbacks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist_mem.data.batch import Batch
from dist_mem.data.segments import collate
from dist_mem.errors import UnusableError
from dist_mem.recompute.batch import StepRead, read_step, run
from dist_mem.runtime.distributed import World
from dist_mem.training import loop
from dist_mem.training.divergence import Divergence
from dist_mem.training.history import HISTORY
from tests.support.jobs import train_here, write_config
from tests.support.messages import refused
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks
Pool = Callable[[int], RankPool]
Delivered = dict[int, list[Batch]]  # by step


@contextmanager
def planted_spike(at: int | None) -> Iterator[None]:
    """The loss of the update that is judged `at` so many updates were judged counts as a spike, once."""
    judged: list[float] = []

    def judge(self: Divergence, loss: float) -> str | None:
        judged.append(loss)
        return "the loss is a planted spike" if len(judged) == at else None

    with mock.patch.object(Divergence, "judge", judge):
        yield


def train_recording(world: World, config: Path, changes: list[str], diverges_at: int | None = None) -> Delivered:
    """Train, and return what this rank's Feed delivered for each step, the last time it was made."""
    delivered: Delivered = {}
    train_step = loop.train_step

    def recording(context: Any, state: Any, update: Any, *arguments: Any, **options: Any) -> Any:
        delivered[state.step + 1] = update.batches
        return train_step(context, state, update, *arguments, **options)

    with mock.patch.object(loop, "train_step", recording), planted_spike(diverges_at):
        assert train_here(world, config, changes) == 0
    return delivered


def batches_of(read: StepRead, rank: int) -> dict[int, Batch]:
    """Return the micro-batches of a rank without their idle lanes, by number."""
    lanes = [lane for lane in read.lanes if lane.rank == rank]
    numbers = sorted({number for lane in lanes for number in lane.micro_batches})
    return {
        number: collate(
            [lane.segments[lane.micro_batches.index(number)] for lane in lanes if number in lane.micro_batches],
            seg_len=read.config.train.seg_len,
            with_recall=False,
            blocks=read.config.data.blocks,
        )
        for number in numbers
    }


def assert_as_delivered(run_dir: Path, step: int, delivered: list[Delivered]) -> None:
    read = read_step(run_dir, step)
    assert read.part.ranks == len(delivered)
    for rank, of_rank in enumerate(delivered):
        found = batches_of(read, rank)
        busy = {number: batch for number, batch in enumerate(of_rank[step]) if (batch.document >= 0).any()}
        assert found.keys() == busy.keys()
        for number, batch in busy.items():
            is_busy = batch.document >= 0
            for ours, theirs in zip(found[number], batch, strict=True):
                assert theirs is None or torch.equal(ours, theirs[is_busy]), f"step {step}, rank {rank}"


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
    tmp_path: Path, books: Path, rank_pool: Pool, changes: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path / "run.yaml",
        books,
        run_dir,
        {"schedule": {"kind": "constant"}, "checkpoint": {"every": 2}, "memory": {"mem_len": 16}},
        {"divergence": {"action": "skip"}},
        changes,
    )
    if "memory" in changes:
        config.write_text(config.read_text().replace("  mem_len: 16\n", ""))
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


def test_a_rolled_back_step_is_as_delivered_the_last_time(tmp_path: Path, books: Path, rank_pool: Pool) -> None:
    run_dir = tmp_path / "run"
    changes = {"divergence": {"action": "rollback"}, "train": {"steps": 9}, "checkpoint": {"every": 3}}
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"schedule": {"kind": "constant"}}, changes)
    delivered = rank_pool(2).run(train_recording, config, [], 5)
    for step in delivered[0]:
        assert_as_delivered(run_dir, step, delivered)


@pytest.fixture
def run_dir(tmp_path: Path, books: Path, rank_pool: Pool) -> Path:
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
    (run_dir / HISTORY).unlink()
    with refused(UnusableError, "history.jsonl"):
        read_step(run_dir, 1)

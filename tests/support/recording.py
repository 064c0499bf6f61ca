"""Trainings of which is kept what each step was given, and steps that are computed again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dist_mem.data.batch import Batch
from dist_mem.data.segments import collate
from dist_mem.recompute import compare_step
from dist_mem.recompute.batch import StepRead, read_step
from dist_mem.recompute.compare_step import recompute_step
from dist_mem.recompute.recompute import RecomputedStep
from dist_mem.runtime.distributed import World
from dist_mem.training import loop
from dist_mem.training.divergence import Divergence
from tests.support.jobs import train_here

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
            with_recall=any(split.documents.has_recall for split in read.splits),
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
                if theirs is not None:
                    assert ours is not None and torch.equal(ours, theirs[is_busy]), f"step {step}, rank {rank}"


def found_by(world: World, run_dir: Path, step: int) -> tuple[int, RecomputedStep, list[str]]:
    """Replay a step in existing ranks; return the exit code, what was computed, and on rank 0 the report."""
    found: list[RecomputedStep] = []
    lines: list[str] = []
    report, recompute = compare_step.report, compare_step.recompute

    def keep(*arguments: Any, **options: Any) -> RecomputedStep:
        found.append(recompute(*arguments, **options))
        return found[-1]

    def keep_lines(*arguments: Any) -> Iterator[str]:
        lines.extend(report(*arguments))
        return iter(lines)

    with mock.patch.object(compare_step, "recompute", keep), mock.patch.object(compare_step, "report", keep_lines):
        code = recompute_step(world, run_dir, step)
    return code, found[0], lines

"""RUN/history.jsonl: which part of a run made a step."""

from __future__ import annotations

from pathlib import Path

import torch

from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.training.history import HISTORY, begin_part, part_of, read_history
from tests.support.messages import refused
from tests.support.tiny import tiny_config


def begin(run_dir: Path, step: int, *, ranks: int = 2, first_trained: int = 0) -> None:
    world = World(rank=0, size=ranks, local_rank=0, local_size=ranks, device=torch.device("cpu"))
    begin_part(tiny_config({"run_dir": str(run_dir)}), world, step, first_trained=first_trained)


def test_a_step_belongs_to_the_last_part_that_begins_before_it(tmp_path: Path) -> None:
    for step, ranks in ((0, 2), (40, 3), (60, 1)):
        begin(tmp_path, step, ranks=ranks)
    parts = read_history(tmp_path)
    ranks = {step: part_of(parts, step).ranks for step in (1, 40, 41, 60, 61, 1000)}
    assert ranks == {1: 2, 40: 2, 41: 3, 60: 3, 61: 1, 1000: 1}
    assert parts[0].config == tiny_yaml(tmp_path)


def tiny_yaml(run_dir: Path) -> str:
    from dist_mem.config import to_yaml

    return to_yaml(tiny_config({"run_dir": str(run_dir)}))


def test_a_part_replaces_those_that_began_at_its_step_or_later(tmp_path: Path) -> None:
    for step in (0, 20, 40, 60):
        begin(tmp_path, step)
    begin(tmp_path, 40, first_trained=51)  # a rollback
    assert [(part.step, part.first_trained) for part in read_history(tmp_path)] == [(0, 0), (20, 0), (40, 51)]


def test_parts_are_alike_if_only_their_steps_differ(tmp_path: Path) -> None:
    begin(tmp_path, 0)
    begin(tmp_path, 20)
    begin(tmp_path, 40, ranks=3)
    first, second, third = read_history(tmp_path)
    assert first.is_like(second)
    assert not second.is_like(third)


def test_a_step_before_the_run_and_a_missing_or_damaged_history_are_refused(tmp_path: Path) -> None:
    with refused(UnusableError, "history.jsonl"):
        read_history(tmp_path)
    begin(tmp_path, 500)
    with refused(UnusableError):
        part_of(read_history(tmp_path), 500)
    (tmp_path / HISTORY).write_text('{"step": 1}\n')
    with refused(UnusableError, "history.jsonl"):
        read_history(tmp_path)
    (tmp_path / HISTORY).write_text("{\n")
    with refused(UnusableError):
        read_history(tmp_path)

"""RUN/history.jsonl: which part of a run made a step."""

from pathlib import Path

import torch

from dist_mem.config import Config, to_yaml
from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.training.history import HISTORY, begin_part, part_of, read_history
from dist_mem.training.state import TrainState
from tests.support.messages import refused
from tests.support.tiny import tiny_config


def begin(run_dir: Path, step: int, *, ranks: int = 2, first_trained: int = 0) -> Config:
    config: Config = tiny_config({"run_dir": str(run_dir)})
    world = World(rank=0, size=ranks, local_rank=0, local_size=ranks, device=torch.device("cpu"))
    state = TrainState(step, [], torch.zeros(0, 3, dtype=torch.int64))
    begin_part(Path(config.run_dir), to_yaml(config), world, state, first_trained=first_trained)
    return config


def test_a_step_belongs_to_the_last_part_that_begins_before_it(tmp_path: Path) -> None:
    for step, ranks in ((0, 2), (20, 2), (40, 3), (60, 1)):
        config = begin(tmp_path, step, ranks=ranks)
    parts = read_history(tmp_path)
    ranks_of = {step: part_of(parts, step).ranks for step in (1, 40, 41, 60, 61, 1000)}
    assert ranks_of == {1: 2, 40: 2, 41: 3, 60: 3, 61: 1, 1000: 1}
    assert parts[0].config == to_yaml(config)
    assert parts[0].is_like(parts[1]) and not parts[1].is_like(parts[2])


def test_a_part_replaces_those_that_began_at_its_step_or_later(tmp_path: Path) -> None:
    for step in (0, 20, 40, 60):
        begin(tmp_path, step)
    begin(tmp_path, 40, first_trained=51)  # a rollback
    assert [(part.step, part.first_trained) for part in read_history(tmp_path)] == [(0, 0), (20, 0), (40, 51)]


def test_a_step_before_the_run_and_a_missing_or_damaged_history_are_refused(tmp_path: Path) -> None:
    with refused(UnusableError, "history.jsonl"):
        read_history(tmp_path)
    begin(tmp_path, 500)
    with refused(UnusableError, "--step 500"):
        part_of(read_history(tmp_path), 500)
    for damaged in ('{"step": 1}\n', "{\n"):
        (tmp_path / HISTORY).write_text(damaged)
        with refused(UnusableError, "history.jsonl"):
            read_history(tmp_path)
    with refused(UnusableError, "give the directory of a run"):
        read_history(tmp_path / HISTORY)  # a file, as a configuration

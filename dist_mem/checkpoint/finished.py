"""The file that marks a run as finished: `RUN/finished.json`.

With it, a start of a finished run ends before it opens data or DeepSpeed: job arrays and chains are submitted many
times. It is valid only for a configuration that `find_resumption` has compared with the checkpoint's.
"""

from __future__ import annotations

import json
from pathlib import Path

from dist_mem.checkpoint.manifest import step_dir
from dist_mem.checkpoint.resume_choice import AUTO
from dist_mem.checkpoint.resume_source import Resumption
from dist_mem.config import Config, TrainConfig
from dist_mem.data.curriculum import stages_of
from dist_mem.runtime.distributed import World, decided_by_rank0
from dist_mem.runtime.files import write_text

_FILE = "finished.json"


def mark_finished(run_dir: Path, step: int, train: TrainConfig) -> None:
    """Record `step` as the last step; `train` is a resolved `TrainConfig`. Raises OSError."""
    content = {"format_version": 1, "step": step, "steps": train.steps, "epochs": train.epochs}
    write_text(run_dir / _FILE, json.dumps(content) + "\n")


def is_finished(config: Config, world: World, resumption: Resumption) -> bool:
    """Whether the checkpoint is the last one of a run that needs no more steps; collective."""
    run_dir, choice = Path(config.run_dir), resumption.choice
    paths, before = ([stage.data.path for stage in stages_of(each)] for each in (config, resumption.saved))
    if config.resume != AUTO or paths != before:
        return False  # data at another path are compared with those of the run only when the job is opened
    step = decided_by_rank0(lambda: _finished_step(run_dir, config.train))
    if step is None or choice.directory != step_dir(run_dir, step):
        return False
    if world.rank == 0:
        print(f"{run_dir} is finished: step {step} was the last one; to train on, set train.steps higher")
    return True


def _finished_step(run_dir: Path, train: TrainConfig) -> int | None:
    """Return the last step of a run that needs no more steps; None for other runs, or if the file is damaged."""
    try:
        content = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        step, length = content["step"], (content["steps"], content["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if length == (train.steps, train.epochs) else None

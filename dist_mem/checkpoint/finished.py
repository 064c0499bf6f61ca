"""The mark of a run that has made its last step: `RUN/finished.json`.

With it a finished run is known before anything is built: an array of jobs, or a chain, is handed in again and again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.manifest import CheckpointError, step_dir
from dist_mem.checkpoint.resume_choice import AUTO, verify_together
from dist_mem.distributed import World, decided_by_rank0
from dist_mem.files import write_text

FORMAT_VERSION = 1
_FILE = "finished.json"


def mark_finished(run_dir: Path, step: int, train: Any) -> None:
    """Note that step was the last one; `train` is a resolved `TrainConfig`. Raises OSError."""
    content = {"format_version": FORMAT_VERSION, "step": step, "steps": train.steps, "epochs": train.epochs}
    write_text(run_dir / _FILE, json.dumps(content) + "\n")


def is_finished(config: Any, world: World) -> bool:
    """Whether nothing is left to train and the last checkpoint is whole; every rank calls it."""
    run_dir = Path(config.run_dir)
    step = decided_by_rank0(lambda: finished_step(run_dir, config.train), OSError) if config.resume == AUTO else None
    if step is None:
        return False
    try:
        verify_together(step_dir(run_dir, step), world)
    except CheckpointError:
        return False  # the job goes on from an earlier one, and says so
    if world.rank == 0:
        print(f"{run_dir} is finished: step {step} was the last one")
    return True


def finished_step(run_dir: Path, train: Any) -> int | None:
    """The last step of a run that was not asked for more since; None for any other, and where the mark is no good."""
    try:
        content = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        step, asked = content["step"], (content["steps"], content["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_here = step_dir(run_dir, step).is_dir()
    return step if is_here and asked == (train.steps, train.epochs) else None

"""The mark of a run that has made its last step: `RUN/finished.json`.

With it the start of a finished run ends before data or DeepSpeed are opened: arrays and chains of jobs are submitted
again and again. It only answers for a configuration that `find_resumption` has compared with the checkpoint's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.manifest import step_dir
from dist_mem.checkpoint.resume_choice import AUTO
from dist_mem.checkpoint.resume_source import Resumption
from dist_mem.runtime.distributed import World, decided_by_rank0
from dist_mem.runtime.files import write_text

FORMAT_VERSION = 1
_FILE = "finished.json"


def mark_finished(run_dir: Path, step: int, train: Any) -> None:
    """Note that step was the last one; `train` is a resolved `TrainConfig`. Raises OSError."""
    content = {"format_version": FORMAT_VERSION, "step": step, "steps": train.steps, "epochs": train.epochs}
    write_text(run_dir / _FILE, json.dumps(content) + "\n")


def is_finished(config: Any, world: World, resumption: Resumption) -> bool:
    """Whether the checkpoint is the last of a run that wants no more steps; every rank calls it."""
    run_dir, choice = Path(config.run_dir), resumption.choice
    if config.resume != AUTO or config.data.path != resumption.saved.data.path:
        return False  # the job is opened: only then are the data at another path compared with those of the run
    step = decided_by_rank0(lambda: finished_step(run_dir, config.train), OSError)
    if step is None or choice.directory != step_dir(run_dir, step):
        return False
    if world.rank == 0:
        print(f"{run_dir} is finished: step {step} was the last one; to train on, set train.steps higher")
    return True


def finished_step(run_dir: Path, train: Any) -> int | None:
    """The last step of a run that wants no more steps; None for any other, and where the mark is damaged."""
    try:
        content = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        step, asked = content["step"], (content["steps"], content["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if asked == (train.steps, train.epochs) else None

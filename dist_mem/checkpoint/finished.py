"""The mark of a run that has made its last step: `RUN/finished.json`.

With it a finished run is known in a moment, without torch: an array of jobs, or a chain, is handed in again and again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dist_mem.files import write_text

FORMAT_VERSION = 1
_FILE = "finished.json"


def mark_finished(run_dir: Path, step: int, train: Any) -> None:
    """Note that step was the last one; `train` is a resolved `TrainConfig`. Raises OSError."""
    content = {"format_version": FORMAT_VERSION, "step": step, "steps": train.steps, "epochs": train.epochs}
    write_text(run_dir / _FILE, json.dumps(content) + "\n")


def finished_step(run_dir: Path, train: Any) -> int | None:
    """The last step of a run that is finished and was not asked for more since; None for any other.

    A mark that cannot be read, or whose checkpoint is gone, counts for nothing: the job looks for itself then.
    """
    try:
        content = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        step, asked = content["step"], (content["steps"], content["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_here = (run_dir / "checkpoints" / f"step-{step:08d}").is_dir()
    return step if is_here and asked == (train.steps, train.epochs) else None

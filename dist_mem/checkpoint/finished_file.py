"""The file that marks a run as finished: `RUN/finished.json`. Reading it does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import TrainConfig
from dist_mem.errors import UnusableError
from dist_mem.runtime.file_schema import check, integer, number, optional, read_json, record
from dist_mem.runtime.files import is_missing, write_text

_FILE = "finished.json"
_REMEDY = "; remove the file"


class TrainingEnd(NamedTuple):
    """The last step of a run, and the length of its training that was configured."""

    step: int
    steps: int | None
    epochs: float | None


_FINISHED = record({"step": integer(), "steps": optional(integer()), "epochs": optional(number)}, is_open=True)


def mark_finished(run_dir: Path, step: int, train: TrainConfig) -> None:
    """Record `step` as the last step; `train` is a resolved `TrainConfig`. Raises OSError."""
    content = {"format_version": 1, "step": step, "steps": train.steps, "epochs": train.epochs}
    write_text(run_dir / _FILE, json.dumps(content) + "\n")


def unmark_finished(run_dir: Path) -> None:
    """Remove the mark: the run trains on. Raises OSError."""
    (run_dir / _FILE).unlink(missing_ok=True)


def read_finished(run_dir: Path) -> TrainingEnd | None:
    """Return what `mark_finished` recorded; None if the run is not marked as finished.

    Raises:
        OSError: the file cannot be read.
        UnusableError: it is damaged.
    """
    path = run_dir / _FILE
    if is_missing(path):
        return None
    body = read_json(path, UnusableError, _REMEDY)
    check(body, _FINISHED, path, UnusableError, _REMEDY)
    return TrainingEnd(*(body[name] for name in TrainingEnd._fields))

"""The files of a run that a start reads or replaces: all are read before the first write.

So a start that is refused leaves the run directory as it was, whatever the damage, and one that is not finds what it
needs hours later.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.runtime.files import is_missing, open_regular
from dist_mem.tracking.log import METRICS_FILE, check_log
from dist_mem.tracking.mlflow.store import read_run_id
from dist_mem.training.goodput import read_starts
from dist_mem.training.history import read_parts

CONFIG = "config.yaml"


def check_run_files(run_dir: Path) -> None:
    """Read the files of a run directory, which need not exist; what others have put beside them does not matter.

    Raises:
        UnusableError: one is damaged, or something else has its name: a folder, a pipe, a link that leads nowhere.
        OSError: one cannot be read now.
    """
    with suppress(FileNotFoundError):
        open_regular(run_dir / CONFIG).close()
    for read in (read_finished, read_parts, read_starts, read_run_id):
        read(run_dir)
    if not is_missing(log := run_dir / METRICS_FILE):
        check_log(log)

"""Choose the MLflow run of a run directory: from RUN/mlflow_run_id, the checkpoint, or MLFLOW_RUN_ID, in this order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment
from dist_mem.runtime.files import write_text

RUN_ID_FILE = "mlflow_run_id"  # in the run directory
_FORM = re.compile(r"[a-zA-Z0-9][\w-]{0,255}", re.ASCII)  # of MLflow's ids


def read_run_id(run_dir: Path) -> str | None:
    """Return the MLflow run of a run directory; None before it has one.

    Raises:
        UnusableError: the content of the file is no id.
    """
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return _checked(text, str(path), "write the id of the run into it, or delete it: the run is found by its journal")


def requested_run_id() -> str | None:
    """Return the run of MLFLOW_RUN_ID, or None.

    Raises:
        UnusableError: the value of the variable is no id.
    """
    text = mlflow_environment().run_id
    return text and _checked(text, "environment: MLFLOW_RUN_ID", "unset it to create a new run")


def settle_run_id(run_dir: Path, of_checkpoint: str | None, *, report: Callable[[str], None]) -> str | None:
    """Store and return the run to use: that of the run directory, of the checkpoint, or the requested one; else None.

    Raises:
        UnusableError: one of them is no id.
    """
    stored, requested = read_run_id(run_dir), requested_run_id()
    known = stored
    if known is None and of_checkpoint:
        known = _checked(of_checkpoint, "mlflow_run_id in the checkpoint's manifest.json", f"write it to {RUN_ID_FILE}")
    if known and requested and known != requested:
        report(f"MLFLOW_RUN_ID is {requested}, but {run_dir} continues its MLflow run {known}")
    if stored is None and (known or requested):
        write_text(run_dir / RUN_ID_FILE, f"{known or requested}\n")
    return known or requested


def _checked(text: str, where: str, fix: str) -> str:
    if _FORM.fullmatch(text):
        return text
    raise UnusableError(
        f"{where} is {text[:60]!r}, but the id of an MLflow run has letters and digits only, 32 as a rule; {fix}"
    )

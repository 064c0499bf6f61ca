"""Weights & Biases: a run in RUN/wandb, written without a network; `wandb sync RUN/wandb/offline-run-*` sends it.

Every start of a run directory writes one more folder there, all with the id in RUN/wandb_run_id: W&B shows one run.
WANDB_MODE=online sends while the job runs, WANDB_MODE=disabled writes nothing. No error of the client stops a training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf

from dist_mem.config import Config
from dist_mem.runtime.environment import wandb_environment
from dist_mem.runtime.files import write_text
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.tracker import Point, Sink

ID_FILE = "wandb_run_id"  # in the run directory
_PROJECT = "dist_mem"


class WandbRun(Sink):
    """Logs every point under its step. W&B has each step once: repeated steps keep their first values."""

    def __init__(self, config: Config, run_dir: Path, kept: Sequence[Point], *, report: Callable[[str], None]) -> None:
        """Begin a run, or continue the one of the run directory.

        Args:
            kept: points that were logged before; W&B gets them if the run directory had no W&B run yet.
            report: shows a line to the user.
        """
        self._report, self._last_step = report, 0
        self._run: Any = None  # wandb.Run; None: it cannot be used
        self._attempt(lambda: self._open(config, run_dir, kept))

    def _open(self, config: Config, run_dir: Path, kept: Sequence[Point]) -> None:
        mode = wandb_environment(project=_PROJECT)
        import wandb

        id_file = run_dir / ID_FILE
        is_new = not id_file.exists()
        if is_new:
            write_text(id_file, uuid4().hex[:8] + "\n")
        hooks = sys.excepthook, sys.exit  # the client replaces both, to report errors that are ours to report
        options: dict[str, Any] = {
            "project": config.tracking.experiment,  # None: WANDB_PROJECT
            "name": config.tracking.run_name or config.name,
            "id": id_file.read_text(encoding="utf-8").strip(),
            "config": OmegaConf.to_container(config, resolve=False),  # values from the environment may be secrets
            "dir": str(run_dir),
            "mode": mode,
            "resume": "allow",
            "reinit": "create_new",  # a program may have a run of its own
        }
        quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_code": True, "disable_git": True}
        try:
            self._run = wandb.init(**options, settings=wandb.Settings(**quiet, x_disable_meta=True))
        finally:
            sys.excepthook, sys.exit = hooks
        self._report(f"W&B: run {self._run.id} in {run_dir / 'wandb'}, {mode}")
        for point in kept if is_new else ():
            self.log(point)

    def log(self, point: Point) -> None:
        if self._run is None or point.step < self._last_step:
            return
        self._last_step = point.step
        values = {in_group(name): value for name, value in point.metrics.items()}
        self._attempt(lambda: self._run.log(values, step=point.step))

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "params" and self._run is not None:
            self._attempt(lambda: self._run.config.update(body["params"], allow_val_change=True))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=0 if status == "FINISHED" else 1))
            self._run = None

    def _attempt(self, what: Callable[[], object]) -> None:
        """Call the client; after an error, report it once and do without the client."""
        try:
            what()
        except Exception as error:  # of any of the client's libraries
            self._run = None
            reason = str(error).partition("\n")[0]
            lost = "from here on W&B gets nothing of this job; metrics.jsonl has every point"
            self._report(f"warning: W&B: {type(error).__name__}: {reason}; {lost}")

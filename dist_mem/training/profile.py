"""Trace of a few steps of a run (`train.profile`), for Perfetto, and the table of its costliest operators.

    RUN/profile/steps-10-15.json.gz   open it at https://ui.perfetto.dev
    RUN/profile/steps-10-15.txt       the ten operators with the most time of their own

The trace contains what rank 0 does between the two steps: updates, reading, evaluations, saving.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from dist_mem.config import TrainConfig
from dist_mem.config.constraints import profile_problem
from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.files import make_folder, naming, write_text
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.agreement import LocalFailure

FOLDER = "profile"
NUM_OPERATORS = 10


def refuse_profile_outside(train: TrainConfig, total_steps: int) -> None:
    """Raise UnusableError if `train.profile` is outside of the run; with `train.epochs` only the data can tell."""
    if text := profile_problem(train.profile, total_steps):
        raise UnusableError(f"train.profile: {text}")


class Profile:
    """The trace of a run. Every rank has one, so that all beat alike; rank 0 records."""

    def __init__(self, train: TrainConfig, run_dir: str, world: World, tracker: Tracker, failure: LocalFailure) -> None:
        self._first, self._last = train.profile or (0, 0)
        self._run_dir, self._is_recorder = Path(run_dir), world.rank == 0
        self._has_gpu = world.device.type == "cuda"
        self._tracker, self._failure = tracker, failure
        self._begin_step: int | None = None  # of the trace that is being recorded
        self._profiler: profile | None = None  # on rank 0

    def begin_if_due(self, step: int) -> None:
        """Begin the trace before the update that follows `step`, if that lies between the two steps."""
        if self._begin_step is not None or not self._first <= step < self._last:
            return
        beat("profiling")
        self._begin_step = step
        if self._is_recorder:
            device = [ProfilerActivity.CUDA] if self._has_gpu else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *device])
            self._profiler.start()

    def end_if_due(self, step: int, *, ends: bool) -> None:
        """End the trace after the update that made `step`, if it is the last one or the run `ends`, and write it.

        An error in that is kept. The table is also logged, and the files are added to the MLflow run.
        """
        if self._begin_step is None or not (ends or step >= self._last):
            return
        beat("profiling")
        first, profiler = self._begin_step, self._profiler
        self._begin_step, self._profiler, self._last = None, None, 0
        if profiler is not None:
            profiler.stop()
            with self._failure.keep_error():
                self._write(profiler, f"{FOLDER}/steps-{first}-{step}")

    def _write(self, profiler: profile, name: str) -> None:
        trace, text = self._run_dir / f"{name}.json.gz", self._run_dir / f"{name}.txt"
        make_folder(trace.parent)
        partial = self._run_dir / f"{name}.partial.json.gz"  # the suffix makes torch compress it
        with naming(partial):
            profiler.export_chrome_trace(os.fspath(partial))
            partial.replace(trace)
        order = "self_device_time_total" if self._has_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=NUM_OPERATORS)
        write_text(text, table)
        self._tracker.message(f"{trace}: the {NUM_OPERATORS} costliest operators\n{table}")
        for path in (trace, text):
            self._tracker.log_artifact(str(path.relative_to(self._run_dir)))

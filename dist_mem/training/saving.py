"""Save the state of a run when it is due, and report what was written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dist_mem.checkpoint.lane_states import Lanes
from dist_mem.checkpoint.manifest import step_dir
from dist_mem.checkpoint.saver import Saver
from dist_mem.checkpoint.snapshot import Snapshot, take_snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.engine.engine import Engine
from dist_mem.errors import CutShortError, RunError, TakenOverError
from dist_mem.runtime.distributed import on_all_ranks
from dist_mem.supervision.watchdog import beat
from dist_mem.training.agreement import Flags
from dist_mem.training.divergence import Divergence
from dist_mem.training.reporting import Reporting, is_multiple
from dist_mem.training.state import TrainState


class Saving:
    """The checkpoints of a run. Every rank has one, and makes the same calls."""

    def __init__(
        self,
        rules: CheckpointConfig,
        saver: Saver,
        engine: Engine,
        divergence: Divergence,
        reporting: Reporting,
        *,
        lane_ids: Tensor,
        metadata: Mapping[str, Any],
        small_files: Mapping[str, bytes],
    ) -> None:
        """Keep what is saved.

        Args:
            lane_ids: (P,) int64, of this rank.
            metadata: keys of the manifest that stay the same in every checkpoint.
            small_files: in every checkpoint, not once per run, so that one copied elsewhere can be loaded there.
        """
        self.saver = saver
        self._rules, self._engine, self._divergence, self._reporting = rules, engine, divergence, reporting
        self._lane_ids, self._metadata, self._small_files = lane_ids, dict(metadata), dict(small_files)

    def is_saved(self, state: TrainState) -> bool:
        """Whether the newest save, or the start, is of this step: there is nothing new to save."""
        return state.step == self.saver.step

    def due(self, state: TrainState, flags: Flags, *, ends: bool) -> bool:
        """Return whether to save this state: the run ends here, or a save is due by its step or by the clock.

        Raises:
            UnfitError, TakenOverError: on every rank; the save in the background has failed.
        """
        if flags.save_failed:
            self.saver.wait()  # raises on all ranks, as the flag is agreed
        return (ends or flags.save or is_multiple(state.step, self._rules.every)) and not self.is_saved(state)

    def run(self, state: TrainState) -> None:
        """Save a state, in the background or synchronously; every rank calls it.

        Raises:
            UnfitError, TakenOverError: on every rank, if this save or the previous one could not be written.
        """
        beat("saving")
        with self._reporting.meter.pause():
            self.saver.wait()  # at most one save in flight, and one copy in memory
            began = time.perf_counter()
            self.saver.save(self._snapshot(state), began=began)

    @contextmanager
    def keep_state(self, state: TrainState) -> Iterator[None]:
        """Save a state that is not saved yet before an error of all ranks leaves the block; the loop does so itself
        where an evaluation is cut short.
        """
        try:
            yield
        except CutShortError:
            raise
        except RunError:
            if not self.is_saved(state):
                self.run(state)
            raise

    def add_evaluation(self, state: TrainState) -> None:
        """Add the evaluation of a step to its checkpoint, from which this job started; every rank calls it.

        `keep_best` finds it there, and the next start does not repeat it.

        Raises:
            UnusableError, UnfitError, TakenOverError: on every rank, if it cannot be written.
        """
        found = self._after_evaluation(state)
        on_all_ranks(lambda: self.saver.change_manifest(state.step, found), "adding an evaluation to its checkpoint")

    def log_start(self, state: TrainState, run_dir: Path) -> None:
        """Log the run's checkpoint of this state, from which this job started, with all points of its step.

        A job that was killed after it had written it, or stopped before its evaluation, has not.
        """
        directory = step_dir(run_dir, state.step)
        if directory.is_dir():
            with self._reporting.failure.keep_error():
                self._reporting.tracker.log_checkpoint(state.step, directory)

    def rehearse(self, state: TrainState) -> None:
        """Try what the first save needs, with empty tensors: that it fails is found here, and not hours later.

        Raises:
            UnfitError, UnusableError: on every rank, as `rehearse_checkpoint`.
        """
        beat("saving")
        self.saver.rehearse(self._snapshot(state, is_rehearsal=True))

    def _snapshot(self, state: TrainState, *, is_rehearsal: bool = False) -> Snapshot:
        reporting = self._reporting
        metadata = {
            "time": time.time(),
            "zero_stage": self._engine.stage,
            "mlflow_run_id": reporting.tracker.run_id,
            "meter": reporting.meter.state(),  # the sums are equal on all ranks; the times are rank 0's
            "goodput": reporting.goodput.state(),
            "divergence": self._divergence.state(),
            **self._after_evaluation(state),
            "mixture": [part._asdict() for part in state.mixture],
            **self._metadata,
        }
        return take_snapshot(
            step=state.step,
            engine=self._engine,
            lanes=Lanes(self._lane_ids, state.cursors, state.memories),
            small_files=self._small_files,
            metadata=metadata,
            is_rehearsal=is_rehearsal,
        )

    def _after_evaluation(self, state: TrainState) -> dict[str, Any]:
        """Return the keys of a manifest that an evaluation changes."""
        points = self._reporting.tracker.num_points
        return {"points": points, "validation": state.validation, "stage_ends": list(state.stage_ends)}

    def report(self, *, waits: bool = False) -> None:
        """Report the checkpoints written since the last call, and those removed.

        Args:
            waits: for the save in flight.

        Raises:
            UnfitError, TakenOverError: on every rank; it could not be written.
        """
        if waits:
            self.saver.wait()
        tracker = self._reporting.tracker
        for saved in self.saver.take_finished():
            self._reporting.meter.note(saved.metrics())
            with self._reporting.failure.keep_error():
                tracker.log_checkpoint(saved.step, saved.written.path)
            for message in (str(saved), *saved.written.messages):
                tracker.message(message)

    def end(self) -> None:
        """Wait for pending saves at the end of a run; a failure is reported, and does not hide why the run ends."""
        beat("saving")
        try:
            self.saver.close()
        except TakenOverError:  # `run` reports it
            return
        except RuntimeError as error:  # a RunError, or the other ranks are gone
            self._reporting.tracker.message(f"error: {error}")
        self.report()

"""Stop a run before its last step: on a signal, on a file, or by the clock. Any of the three is enough.

    a signal on any rank | RUN/STOP, which rank 0 looks for | the end of the job's time, by rank 0's clock
        -> the flag `stop` in the step's all-reduce -> all ranks finish that step, save, and exit with code 85
        -> during an evaluation: all ranks abort it, save, and exit; the next start repeats it from its beginning

A step needs no extra communication for this: the flag is part of the step's all-reduce.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.distributed import World, decide_on_rank0, gather_objects
from dist_mem.runtime.environment import job_end, node_name
from dist_mem.runtime.signals import LEAST_SECONDS, STOP_FILE, StopSignal
from dist_mem.runtime.terminal import some

_SAVES = 3.0  # one in flight, one of the last step, and one as a margin for a disk that is temporarily slow
_LOOK_SECONDS = 1.0  # between two checks for the file: on a network file system each is a request to the server


def refuse_if_asked_to_stop(run_dir: Path, world: World) -> None:
    """Check that nothing asks the run to stop before it starts; every rank calls it, before anything is built.

    Raises:
        UnusableError: on every rank; RUN/STOP exists, or DIST_MEM_JOB_END is not a time.
        UnfitError: on every rank; the job's time is over, or nearly so.
    """

    def look() -> None:
        if (run_dir / STOP_FILE).exists():
            raise UnusableError(f"{run_dir / STOP_FILE} exists, and stops the run: remove it to continue")
        end = job_end()
        if end is not None and end - time.time() < LEAST_SECONDS:
            raise UnfitError(f"{_time_left(end)}: request more time, or unset the variable if another job set it")

    decide_on_rank0(look)


def _time_left(end: float) -> str:
    left = end - time.time()
    what = f"has been over for {-left:.0f} s" if left < 0 else f"is over in {left:.0f} s"
    return f"the time of this job {what} (environment: DIST_MEM_JOB_END={end:.0f})"


class Stopping:
    """Checks the three stop sources once per step; every rank has one."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        signal: StopSignal,
        *,
        training_seconds: Callable[[], float],
        save_seconds: Callable[[], float],
    ) -> None:
        """Start the clocks.

        Args:
            training_seconds: a clock that stops during saves and evaluations.
            save_seconds: how long a save may take.
        """
        self._stop_file, self._rank, self._signal = run_dir / STOP_FILE, world.rank, signal
        self._training_seconds, self._save_seconds = training_seconds, save_seconds
        self._end = job_end() if world.rank == 0 else None
        self._looked = -float("inf")  # time of the last check for the file, monotonic seconds
        self._reason: str | None = None
        self._step_seconds = deque[float](maxlen=10)
        self._last: float | None = None  # training seconds at the begin of the step; before the first one there is none

    def is_asked_for(self) -> bool:
        """Return whether this rank has a reason to stop after the current step; other ranks may have one too."""
        now = self._training_seconds()
        if self._last is not None:
            self._step_seconds.append(now - self._last)
        self._last = now
        return self.has_reason()

    def has_reason(self) -> bool:
        """Return the same as `is_asked_for`, but without recording a step time; for use during an evaluation."""
        if self._reason is None:
            self._reason = self._by_signal() or self._by_file() or self._by_clock()
        return self._reason is not None

    def describe(self) -> str:
        """Return the stop reasons of all ranks; every rank calls it after all have stopped."""
        reasons = [reason for reason in gather_objects(self._reason) if reason is not None]
        return f"stopped {some(reasons, 3)}"  # Slurm may signal all of 512 ranks

    def _by_signal(self) -> str | None:
        name = self._signal.received
        return None if name is None else f"by a signal ({name} on rank {self._rank}, {node_name()})"

    def _by_file(self) -> str | None:
        if self._rank != 0 or time.monotonic() < self._looked + _LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        # Path.exists raises where a network disk fails; here the next look is a second later.
        is_there = os.path.exists(self._stop_file)  # noqa: PTH110
        return f"by {self._stop_file} (remove it first)" if is_there else None

    def _by_clock(self) -> str | None:
        if self._end is None or self._end - time.time() >= (needed := self.seconds_needed()):
            return None
        return f"by the clock: {_time_left(self._end)}, and stopping takes up to {needed:.0f} s"

    def seconds_needed(self) -> float:
        """Return the seconds that a stop needs before the end of the job's time: two steps, and the saves."""
        save = max(LEAST_SECONDS, _SAVES * self._save_seconds())
        return save + 2 * max(self._step_seconds, default=0)  # no time for an evaluation: a stop cuts it short

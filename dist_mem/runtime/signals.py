"""Signals, and the file, that ask a run to stop. No torch in here: they are listened to before it is imported."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

STOP_FILE = "STOP"  # in the run directory; it stays there, and keeps the run from being started, until it is removed
LEAST_SECONDS = 30.0  # that are kept free before the end of the job's time, however fast saving is
OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1)


class StopSignal:
    """SIGTERM, SIGINT, SIGUSR2 and SIGUSR1 set a flag; the loop acts on it at a step boundary, when all ranks know.

    Ask for USR2 where there is a choice: NCCL may catch USR1. A second signal changes nothing, so it cannot hurt a save
    in progress.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = (*OF_SCHEDULERS, signal.SIGINT)) -> None:
        self.received: str | None = None
        self._previous = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            with suppress(TypeError):  # a handler installed from C reads as None and cannot be put back
                signal.signal(number, handler)

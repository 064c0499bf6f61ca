"""The signals, and the file, that stop a run. Imports no torch: signals are handled before torch is imported."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from dist_mem.errors import StoppedEarlyError

STOP_FILE = "STOP"  # in the run directory; it stays, and prevents a start of the run, until the user removes it
LEAST_SECONDS = 30.0  # least time left for saving before the end of the job's time, however fast saving is
OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1)


class StopSignal:
    """A flag set by SIGTERM, SIGINT, SIGUSR2 and SIGUSR1; the loop acts on it at a step boundary, on all ranks at once.

    Prefer USR2 where there is a choice: NCCL may catch USR1. A second signal changes nothing, so it cannot harm a save
    in progress. SIGHUP, of a terminal that closes, counts as SIGTERM unless it is ignored already, as under nohup.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = (*OF_SCHEDULERS, signal.SIGINT)) -> None:
        self.received: str | None = None
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers = (*numbers, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        _ACTIVE.append(self)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def check(self) -> None:
        """End a wait before the first step: a handler that only sets a flag does not end what the system waits for.

        Raises:
            StoppedEarlyError: a signal was received.
        """
        if self.received is not None:
            raise StoppedEarlyError(self.received)

    def restore(self) -> None:
        """Restore the previous handlers."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        for number, handler in self._previous.items():
            with suppress(TypeError):  # a handler installed from C reads as None and cannot be restored
                signal.signal(number, handler)


_ACTIVE: list[StopSignal] = []


def received_signal() -> str | None:
    """Return the name of a signal that a handler of this process has noted, for waits that know no handler."""
    return next((each.received for each in _ACTIVE if each.received), None)

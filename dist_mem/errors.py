"""How the program ends: its exit codes, and the error that a user is told in one line. No torch in here."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1  # something broke on the way: a disk, a network, a part of the machine
EXIT_USAGE = 2  # configuration, data or run directory are wrong: trying again will not help; argparse's code too
EXIT_DIVERGED = 3  # a loss, a memory or a gradient is not finite
EXIT_REQUEUE = 85  # stopped by a signal, a file or the clock, with everything saved: start me again
EXIT_INTERRUPTED = 130  # Ctrl-C in any command but train, as shells tell it
EXIT_TAKEN_OVER = 87  # another job has the run directory: this one stood still for too long
EXIT_HUNG = 86  # the watchdog ended a job in which nothing moved any more: start me again


class UnfitError(RuntimeError):
    """The machine cannot be used as it is now; another start, or other nodes, may do: exit code 1.

    Raised on every rank of a job; the message says where and what to do.
    """


class TakenOverError(RuntimeError):
    """Another job has taken the run directory over from this one: exit code 87. Raised on every rank of a job."""


class UnusableError(ValueError):
    """Configuration, data, checkpoint or run directory cannot be used as they are: exit code 2.

    Raised on every rank of a job; the message says what to change.
    """


class CheckpointError(UnusableError):
    """A checkpoint that cannot be used; the message says why and what to do."""


class CutShortError(Exception):
    """An evaluation was stopped before its end, and nothing of it is kept: exit code 85. Raised on every rank."""


class StoppedEarlyError(Exception):
    """A signal ended a training before its first step: exit code 85. Raised on every rank of a job."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped by {name} before the first step: nothing was changed, the same command starts again")

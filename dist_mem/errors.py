"""Exit codes of the program, and the errors that it reports in one line. This module does not import torch."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1  # something failed during the run: a disk, a network, a part of the machine
EXIT_USAGE = 2  # configuration, data or run directory are wrong: a restart does not help; also argparse's code
EXIT_DIVERGED = 3  # a loss, a memory or a gradient is not finite
EXIT_REQUEUE = 85  # stopped by a signal, a file or a time limit, with everything saved: restart the job
EXIT_INTERRUPTED = 130  # Ctrl-C in any command but train, as shells report it
EXIT_TAKEN_OVER = 87  # another job took over the run directory because this one made no progress for too long
EXIT_HUNG = 86  # the watchdog ended a job that made no progress: restart the job


class UnfitError(RuntimeError):
    """The machine is currently unusable; a restart, or other nodes, may help: exit code 1.

    Raised on every rank of a job; the message names the place and the fix.
    """


class TakenOverError(RuntimeError):
    """Another job has taken over the run directory of this job: exit code 87. Raised on every rank of a job."""


class UnusableError(ValueError):
    """The configuration, data, checkpoint or run directory is unusable: exit code 2.

    Raised on every rank of a job; the message names what to change.
    """


class CheckpointError(UnusableError):
    """A checkpoint is unusable; the message gives the reason and the fix."""


class CutShortError(Exception):
    """An evaluation was stopped before its end, and nothing of it is kept: exit code 85. Raised on every rank."""


class StoppedEarlyError(Exception):
    """A signal ended training before its first step: exit code 85. Raised on every rank of a job."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped by {name} before the first step: nothing was changed, the same command starts again")

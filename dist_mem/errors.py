"""The errors that the program reports in one line, each with its exit code. This module does not import torch.

    UnusableError  2   the user's input: another start would fail too
    UnfitError     1   the machine: another start, or other nodes, may succeed
    DivergedError  3   the training: a loss, a memory or a gradient is not finite, or a loss is a spike

`run_error` sorts other errors into these. `runtime/distributed.py:on_all_ranks` makes all ranks raise the same one, and
`__main__.py:main` prints it and returns its exit code.
"""

from __future__ import annotations

import errno
from typing import ClassVar

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED = 0, 1, 2, 3  # 2 is argparse's code too
EXIT_REQUEUE, EXIT_HUNG, EXIT_TAKEN_OVER = 85, 86, 87
EXIT_INTERRUPTED = 130  # as shells report it

MEANINGS = {  # of the exit codes, as the pages have them
    EXIT_DONE: "done",
    EXIT_FAILED: "something broke on the way: a disk, a network, a rank, an unfit node",
    EXIT_USAGE: "configuration, data or run directory are wrong",
    EXIT_DIVERGED: "training diverged",
    EXIT_REQUEUE: "stopped by a signal, by RUN/STOP or by the clock; all is saved",
    EXIT_HUNG: "the watchdog ended a job in which nothing moved",
    EXIT_TAKEN_OVER: "another job had taken the run directory over",
    EXIT_INTERRUPTED: "Ctrl-C in another command than train",
}

# Errors of the system that last until somebody changes a path, a permission or a name. All others may pass.
_LASTING = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)


class RunError(Exception):
    """An error that is reported in one line. In a job it is raised on every rank, with the same exit code."""

    exit_code: ClassVar[int] = EXIT_FAILED
    is_agreed = False  # set where the ranks have agreed on it: each raises it, so that one of them prints it for all


class UnusableError(RunError, ValueError):
    """The configuration, data, checkpoint or run directory is unusable; the message names what to change."""

    exit_code = EXIT_USAGE


class CheckpointError(UnusableError):
    """A checkpoint is unusable; the message gives the reason and the fix."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now; its disk may recover before the next start."""

    exit_code = EXIT_FAILED


class UnfitError(RunError, RuntimeError):
    """The machine is currently unusable; a restart may help. The message names the place and the fix."""


class DivergedError(RunError, RuntimeError):
    """Training cannot continue. Every rank raises it in the same step, before anything has changed."""

    exit_code = EXIT_DIVERGED

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class TakenOverError(RunError, RuntimeError):
    """Another job has taken over the run directory of this job."""

    exit_code = EXIT_TAKEN_OVER


class StoppedError(RunError):
    """A signal ended the work; nothing is half written, and the same command starts it again."""

    exit_code = EXIT_REQUEUE


class CutShortError(StoppedError):
    """An evaluation was stopped before its end, and nothing of it is kept."""


class StoppedEarlyError(StoppedError):
    """A signal ended training before its first step."""

    def __init__(self, name: str) -> None:
        super().__init__(f"stopped by {name} before the first step: nothing was changed, the same command starts again")
        self.signal_name = name

    def __reduce__(self) -> tuple[type[StoppedEarlyError], tuple[str]]:
        return type(self), (self.signal_name,)  # as a rank sends it to others


def run_error(error: Exception, message: str | None = None) -> RunError:
    """Return the error to report for `error`, with this message (default: its own); a RunError is that error itself.

    A ValueError is the user's. An OSError is the user's if it lasts until somebody changes a path or a permission, and
    the machine's otherwise (a full disk, a failing one, a network): another start may then succeed.
    """
    if isinstance(error, RunError):
        return error
    text = str(error) if message is None else message
    is_lasting = error.errno in _LASTING if isinstance(error, OSError) else isinstance(error, ValueError)
    return UnusableError(text) if is_lasting else UnfitError(text)

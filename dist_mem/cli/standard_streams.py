"""Standard output and error: what cannot be written is dropped, and the command continues.

So an evaluation still writes its files if its reader has gone, as with `| head`, and a training continues if the disk
of its log is full, or its terminal is closed. A training notes in its run directory that lines were dropped; any other
command ends with an exit code. The default action of SIGPIPE is not an option: a lost connection to MLflow would kill
the process too.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dist_mem.runtime.environment import node_name
from dist_mem.runtime.files import open_regular

LOST_LINES = "lost_output.txt"  # in the run directory


class Output(io.FileIO):
    """A standard stream, by its file descriptor; it drops what cannot be written."""

    is_read = True  # False: nobody reads it any more
    raises = False  # whether the writer gets one BrokenPipeError
    error: OSError | None = None  # the first one that dropped output, other than a broken pipe
    run_dir: Path | None = None  # of a training, where the first drop is noted

    def write(self, content: Any) -> Any:
        try:
            num_written = super().write(content)
        except BrokenPipeError:
            self.is_read = False
            _redirect_to_null(self.fileno())  # for all writers, C code and child processes too
            if self.raises:
                raise
            return super().write(content)
        except OSError as error:  # a full or failing disk, a closed terminal; it may be written again later
            return self._drop(error, content)
        if num_written is None:
            return self._drop(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), content)
        return num_written

    def _drop(self, error: OSError, content: Any) -> int:
        self.error = self.error or error
        if self.run_dir is not None and self.run_dir.is_dir():  # which a training makes after its first line
            with suppress(OSError):  # on the same disk: tried again with the next line
                place = f"process {os.getpid()} on {node_name()}"
                line = f"{time.strftime('%F %T')}: {place} lost lines for {self.name}: {error}\n"
                with open_regular(self.run_dir / LOST_LINES, "ab") as file:
                    file.write(line.encode(errors="replace"))
                self.run_dir = None
        return memoryview(content).nbytes


def _redirect_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null == number:
        os.set_inheritable(number, True)  # by child processes, as a descriptor from dup2 is
    else:
        os.dup2(null, number)
        os.close(null)


def watch_standard_streams() -> Output:
    """Make `sys.stdout` and `sys.stderr` write through an `Output`; return that of `sys.stdout`."""
    sys.stdout, output = _watch(sys.stdout, 1)
    sys.stderr, _ = _watch(sys.stderr, 2)
    return output


def note_lost_lines(run_dir: Path) -> None:
    """Note from now on in a run directory, once it exists, if a standard stream drops lines."""
    for stream in (sys.stdout, sys.stderr):
        output = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
        if isinstance(output, Output):
            output.run_dir = run_dir


def _watch(stream: TextIO | None, number: int) -> tuple[TextIO, Output]:
    if stream is None:  # closed before the start: the next opened file would get its number, and receive the output
        _redirect_to_null(number)
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as long as the process
    assert isinstance(stream, io.TextIOWrapper)
    file = Output(number, "w", closefd=False)
    file.name = stream.name
    below: Any = file if stream.write_through else io.BufferedWriter(file)  # python -u has no buffer
    wrapped = io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,  # no line fails for a character
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return wrapped, file

"""Broken pipes: if the reader of the output has gone, as with `| head`, discard the output and continue.

So an evaluation still writes its files, and a training continues if the `tee` that writes its log dies. The default
action of SIGPIPE is not an option: a lost connection to MLflow would kill the process too.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class UntilUnread(io.FileIO):
    """A standard stream, by its file descriptor; it discards output once nobody reads it."""

    is_read = True
    raises = False  # whether the writer gets one BrokenPipeError

    def write(self, content: Any) -> Any:
        try:
            return super().write(content)
        except BrokenPipeError:
            self.is_read = False
            _redirect_to_null(self.fileno())  # for all writers, C code and child processes too
            if self.raises:
                raise
            return super().write(content)


def _redirect_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null == number:
        os.set_inheritable(number, True)  # by child processes, as a descriptor from dup2 is
    else:
        os.dup2(null, number)
        os.close(null)


def watch_standard_streams() -> UntilUnread:
    """Make `sys.stdout` and `sys.stderr` write through an `UntilUnread`; return that of `sys.stdout`."""
    sys.stdout, output = _watched(sys.stdout, 1)
    sys.stderr, _ = _watched(sys.stderr, 2)
    return output


def _watched(stream: TextIO | None, number: int) -> tuple[TextIO, UntilUnread]:
    if stream is None:  # closed before the start: the next opened file would get its number, and receive the output
        _redirect_to_null(number)
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as long as the process
    assert isinstance(stream, io.TextIOWrapper)
    file = UntilUnread(number, "w", closefd=False)
    file.name = stream.name
    below: Any = file if stream.write_through else io.BufferedWriter(file)  # python -u has no buffer
    wrapped = io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return wrapped, file

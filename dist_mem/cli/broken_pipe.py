"""What becomes of output that nobody reads any more, as behind `| head`: it goes nowhere, and the command goes on.

So an evaluation writes its files all the same, and a training outlives the `tee` that kept its log. (Dying by SIGPIPE,
as small tools do, is no choice: a lost connection to MLflow would be the end, too.)
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class UntilUnread(io.FileIO):
    """A standard stream, by the number of its file; from where nobody reads on it leads nowhere."""

    is_read = True
    tells = False  # whoever writes, by BrokenPipeError, once

    def write(self, content: Any) -> Any:
        try:
            return super().write(content)
        except BrokenPipeError:
            self.is_read = False
            _lead_nowhere(self.fileno())  # for all that writes there, C and child processes too
            if self.tells:
                raise
            return super().write(content)


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == number:
        os.set_inheritable(number, True)  # by child processes, as what dup2 makes
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)


def watch_standard_streams() -> UntilUnread:
    """Put such files below `sys.stdout` and `sys.stderr`; returns that of the output."""
    sys.stdout, output = _watched(sys.stdout, 1)
    sys.stderr, _ = _watched(sys.stderr, 2)
    return output


def _watched(stream: TextIO | None, number: int) -> tuple[TextIO, UntilUnread]:
    if stream is None:  # closed before we began: the next file to be opened would get its number, and what is said
        _lead_nowhere(number)
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # lives as long as we do
    assert isinstance(stream, io.TextIOWrapper)
    file = UntilUnread(number, "w", closefd=False)
    file.name = stream.name
    below: Any = file if stream.write_through else io.BufferedWriter(file)  # python -u has no buffer
    said = io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return said, file

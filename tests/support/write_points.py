"""Record all calls of a process that change files under a directory, and kill the process at one of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_FOLDER_ARGUMENT = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1}  # event -> which argument is dir_fd
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class WritePoints:
    """Records the calls of this process from now on, as `mkdir PATH`, and kills it at one of them.

    The calls are those that Python reports to audit hooks, before they happen, in any thread, and `os.fsync`. A kill at
    the fsync of a file first truncates the file to half, as a power loss may.
    """

    def __init__(self, directory: Path, deadly: int | None = None) -> None:
        """Watch `directory`; `deadly` is the index of the call at which the process is killed, from 0."""
        self.met: list[str] = []
        self._directory, self._deadly = directory, deadly
        self._fsync = os.fsync
        os.fsync = self._on_fsync
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, os.PathLike)) and flags & _WRITING:
                self._meet("open", Path(path))
        elif event in _FOLDER_ARGUMENT:
            folder = arguments[_FOLDER_ARGUMENT[event]]
            self._meet(event.removeprefix("os."), (_path_of(folder) if folder >= 0 else Path()) / arguments[0])

    def _on_fsync(self, fd: FileDescriptorLike) -> None:
        self._meet("fsync", _path_of(fd if isinstance(fd, int) else fd.fileno()))
        self._fsync(fd)

    def _meet(self, what: str, path: Path) -> None:
        if not path.is_relative_to(self._directory):
            return
        if len(self.met) == self._deadly:
            if what == "fsync" and path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.met.append(f"{what} {path.relative_to(self._directory)}")


def _path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()

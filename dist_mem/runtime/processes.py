"""Other processes of this machine: whether they run, and the commands that start another Python.

`python -m MODULE` looks for modules in the working directory first, so that a file `yaml.py` in a run folder of others
would run. `-P` leaves that folder out; `keep_working_directory_out` (environment.py) does so for the processes that
libraries start, and for those of a pool. Only this module names the executable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Return the identifier of this boot of the machine, the same in all its containers; empty if it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def process_stat(pid: int) -> tuple[str, str]:
    """Return state letter and start of a process, in ticks since boot, from Linux's /proc; empty without it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # its name may be any bytes
    except OSError:
        return "", ""
    fields = stat.rpartition(")")[2].split()  # the name before may contain blanks
    return fields[0], fields[19]


def pid_scope() -> str:
    """Return an identifier of the processes this one sees by pid: of this boot of the host, and of its container.

    Host names do not suffice: containers often have that of their host, and hosts may all have the same one.
    """
    with suppress(OSError):
        if boot := boot_id():
            return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_running(pid: int) -> bool:
    """Return whether there is a process with this number; a zombie does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process_stat(pid)[0] not in ("Z", "X")


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def dist_mem(*arguments: str) -> list[str]:
    """Return the command of `dist-mem ARGUMENTS` in this installation."""
    return python_module("dist_mem", *arguments)


def own_command(words: Sequence[str]) -> list[str]:
    """Return a command that a user has written, with this Python and this installation of dist_mem."""
    match words:
        case ["dist-mem", *arguments]:
            return dist_mem(*arguments)
        case ["python", "-m", module, *arguments]:
            return python_module(module, *arguments)
        case ["python", *arguments]:
            return [sys.executable, *arguments]
    return list(words)

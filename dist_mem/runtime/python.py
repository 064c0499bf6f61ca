"""Commands that start another Python: the only place that names its executable.

`python -m MODULE` looks for modules in the working directory first, so that a file `yaml.py` in a run folder of others
would run. `-P` leaves that folder out; `keep_working_directory_out` (environment.py) does so for the processes that
libraries start, and for those of a pool.
"""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_python() -> str:
    """Return the executable of this Python, for a command that a user has written with `python`."""
    return sys.executable


def dist_mem(*arguments: str) -> list[str]:
    """Return the command of `dist-mem ARGUMENTS` in this installation."""
    return python_module("dist_mem", *arguments)

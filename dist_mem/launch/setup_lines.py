"""The commands of `launch.setup`: a job stops at the first that fails, so each must be known from its lines."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from dist_mem.runtime.environment import with_environment


def commands(setup: Sequence[str]) -> list[str]:
    """Return the commands of the lines; one, as a loop or a function, may take several of them.

    Raises:
        ValueError: bash does not understand the lines.
    """
    found: list[str] = []
    lines: list[str] = []
    complaint = ""
    for line in "\n".join(setup).splitlines():
        lines.append(line)
        complaint = _complaint("\n".join(lines))
        if not complaint:
            found.append("\n".join(lines))
            lines.clear()
    if lines:
        raise ValueError(f"bash does not understand {lines[0]!r}: {complaint}")
    return found


def _complaint(text: str) -> str:
    """Return what bash says of a text that is no whole command; empty if it is one."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        return "a \\ at its end, but no further line"
    done = subprocess.run(
        ["bash", "-n"], input=f"{text}\n", capture_output=True, text=True, env=with_environment({"LC_ALL": "C"})
    )
    return done.stderr.strip().partition("\n")[0]

"""Time limits that scale with the machine, and waiting for a condition instead of for a time.

A limit is there to end what hangs. It may be long, but a loaded machine must not exceed it.
"""

import os
import subprocess
import time
from collections.abc import Callable
from functools import cache

import psutil

_REFERENCE_SECONDS = 0.05  # of `_slowness_of_a_core` on the machine for which limits are written
_POLL_SECONDS = 0.005


def limit(seconds: float) -> float:
    """Return the time limit of what takes less than `seconds` on one idle core: longer on a slow or loaded machine."""
    cores = len(os.sched_getaffinity(0))
    return seconds * _slowness_of_a_core() * (1.0 + os.getloadavg()[0] / cores)


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 90.0, poll: float = _POLL_SECONDS) -> None:
    """Poll until the condition holds; `seconds` is a `limit`, which grows if the load does."""
    began = time.monotonic()
    while not condition():
        assert (waited := time.monotonic() - began) < limit(seconds), f"waited {waited:.0f} s for {what}"
        time.sleep(poll)


def holds_open(process: subprocess.Popen[str], suffix: str) -> bool:
    """Whether a process has a file of such a name open. One that is closed while we look is no error of psutil's."""
    return any(file.path.endswith(suffix) for file in psutil.Process(process.pid).open_files())


@cache
def _slowness_of_a_core() -> float:
    """Return how many times longer this machine computes than the one for which limits are written; at least 1."""
    began = time.process_time()
    sum(number * number for number in range(1_500_000))
    return max(1.0, (time.process_time() - began) / _REFERENCE_SECONDS)

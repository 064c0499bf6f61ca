"""Order of the test files: the longest first, so that no process is left with a long one at the end; and shares."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from tests.support.paths import ROOT

# Minutes, most of them spent waiting; the others follow by the number of their tests.
LONGEST = (
    "launch/test_slurm_jobs.py",
    "project/test_documented_commands.py",
    "training/test_two_hosts.py",
    "checkpoint/test_crash_sweep.py",
    "launch/test_slurm_script.py",
    "launch/test_slurm_commands.py",
    "launch/test_launch_script.py",
    "training/test_resume.py",
    "checkpoint/test_elastic.py",
    "model/test_compiled.py",
    "supervision/test_watchdog.py",
    "supervision/test_rendezvous.py",
    "engine/test_zero_state.py",
    "engine/test_memory_zero.py",
    "studies/test_runner.py",
    "tracking/test_tracking_outage.py",
    "tracking/test_tracking_auth.py",
    "training/test_stopping.py",
)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the files of LONGEST first, and the others by their number of tests, most first.

    `pytest --no-loadscope-reorder` keeps this order.
    """
    numbers: dict[str, int] = {}
    for item in items:
        numbers[str(item.path)] = numbers.get(str(item.path), 0) + 1
    place = {str(ROOT / "tests" / name): number for number, name in enumerate(LONGEST)}

    def key(item: pytest.Item) -> tuple[int, int, str]:
        path = str(item.path)
        return place.get(path, len(place)), -numbers[path], path

    return sorted(items, key=key)


def is_in_part(name: str, part: str) -> bool:
    """Return whether a test belongs to the part "K/N", the K-th of N from 0; every test belongs to one of the N.

    Raises:
        pytest.UsageError: `part` is none.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise pytest.UsageError(f"--slow-part is {part}, but must be K/N with K below N, as 0/3")
    return zlib.crc32(name.encode()) % int(parts) == int(number)

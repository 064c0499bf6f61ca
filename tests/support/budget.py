"""How much of every test is run: `make test` gives a function a second, `make test-all` 3, the night the rest.

A function with variants (parameters) that take longer together runs with as many of them as fit, evenly spread over
them, and with those marked `core`. `make test-all` has at least one of each function, unless it takes longer than 13
seconds: a landing does not wait for those. tests/durations.json has the seconds of one variant of each function,
measured by `make durations`; a function that it does not name is new, or takes next to nothing.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DURATIONS = ROOT / "tests" / "durations.json"
LEAST = 0.1  # seconds of a variant that are worth a line in the file


@dataclass(frozen=True)
class Budget:
    seconds: float  # of one test function, all its variants
    least: int  # variants of a function of which not even one fits
    longest: float  # seconds of a variant; of a function whose take longer, those marked `core` are run
    without: frozenset[str] = frozenset({"nightly"})  # marks of tests that are left out

    def size(self, number: int, each: float) -> int:
        """Return how many of a function's variants run."""
        if number * each <= self.seconds:
            return number
        return max(self.least, int(self.seconds / each)) if each <= self.longest else 0


BUDGETS = {
    "quick": Budget(1.0, 0, 1.0, frozenset({"nightly", "slurm", "netns", "servers", "pages"})),
    "all": Budget(3.0, 1, 13.0),
}


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Return the seconds of one variant, by function: `tests/nn/test_attention.py::test_name`."""
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found


def function_of(nodeid: str) -> str:
    """Return the name of a test without its parameters."""
    return nodeid.partition("[")[0]


def spread(number: int, size: int) -> list[int]:
    """Return `size` of `number` places, evenly; in a product they go through the values of both sides."""
    step = number // size if size else 0
    return [index * step + index % step for index in range(size)]


def chosen(items: Sequence[pytest.Item], budget: Budget, durations: dict[str, float]) -> list[bool]:
    """Return which tests a budget has room for."""
    functions: dict[str, list[int]] = {}
    runs = [False] * len(items)
    for place, item in enumerate(items):
        if not any(item.get_closest_marker(mark) for mark in budget.without):
            functions.setdefault(function_of(item.nodeid), []).append(place)
            runs[place] = item.get_closest_marker("core") is not None
    for name, places in functions.items():
        size = budget.size(len(places), durations.get(name, 0.0)) - sum(runs[place] for place in places)
        others = [place for place in places if not runs[place]]
        for index in spread(len(others), min(max(size, 0), len(others))):
            runs[others[index]] = True
    return runs


def longest_first(items: Iterable[pytest.Item], durations: dict[str, float]) -> list[pytest.Item]:
    """Return the tests by the time of their files, longest first, so that no process is left with one at the end."""
    kept, seconds = list(items), dict[str, float]()
    for item in kept:
        path = str(item.path)
        seconds[path] = seconds.get(path, 0.0) + durations.get(function_of(item.nodeid), 0.0)
    return sorted(kept, key=lambda item: (-seconds[str(item.path)], str(item.path)))


def write_durations(measured: Iterable[tuple[str, float]], path: Path = DURATIONS) -> None:
    """Write the mean seconds of the functions that were measured; (test, seconds), a test may come several times.

    Other functions keep their line if they still exist.
    """
    seconds: dict[str, dict[str, float]] = {}
    for nodeid, duration in measured:
        variants = seconds.setdefault(function_of(nodeid), {})
        variants[nodeid] = variants.get(nodeid, 0.0) + duration
    means = {name: math.fsum(variants.values()) / len(variants) for name, variants in seconds.items()}
    kept = {name: value for name, value in read_durations(path).items() if exists(name)} | means
    lines = {name: round(value, 2) for name, value in sorted(kept.items()) if value >= LEAST}
    path.write_text(json.dumps(lines, indent=0) + "\n", encoding="utf-8")


def exists(function: str) -> bool:
    """Return whether there still is a test function of this name."""
    path, _, name = function.partition("::")
    return (ROOT / path).is_file() and f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text(encoding="utf-8")

"""What is no figure in JSON and CSV, wherever the package writes them."""

import ast
import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import MAX_EXPONENT, exponential, is_figure, json_text
from tests.support.paths import ROOT

PACKAGE = ROOT / "dist_mem"
# Formats that only this package reads, and whose hashes stay as they were; and words of a command line.
OWN = ("checkpoint/", "supervision/", "evaluation/memory_file.py", "evaluation/kept_memory.py", "studies/grid.py")
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@settings(deadline=None)
@given(CONTENT)
def test_json_is_what_every_reader_takes(content: Any) -> None:
    """node, jq and browsers refuse the NaN and Infinity that Python writes."""
    for is_exact in (False, True):
        again = json.loads(json_text(content, is_exact=is_exact), parse_constant=refuse)
        if isinstance(content, float):
            assert again == content if is_figure(content) else again is None or str(float(again)) == str(content)
            assert is_exact <= (again is not None)


@settings(deadline=None)
@given(st.floats())
def test_csv_has_numbers_or_says_that_there_is_none(number: float) -> None:
    cell = csv_text([["x", number]]).rstrip("\n").split(",")[1]
    assert float(cell) == number if math.isfinite(number) else cell == "n/a"


def test_all_json_and_csv_is_written_by_one_function_each() -> None:
    """A writer of its own would write NaN again."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                is_json = called in ("json.dump", "json.dumps") and not name.startswith(OWN)
                if is_json or called in ("csv.writer", "csv.DictWriter"):
                    found.append((called, name))
    assert set(found) == {("json.dumps", "runtime/figures.py"), ("csv.writer", "runtime/csv_text.py")}


@settings(deadline=None)
@given(st.floats())
def test_a_perplexity_is_a_figure_or_none(nats: float) -> None:
    """A training showed 1.01e304 for every loss above 700."""
    found = exponential(nats)
    assert found == math.exp(nats) if nats < MAX_EXPONENT else math.isnan(found)

"""CSV files of the project: no cell is a formula, numbers stay numbers, and one function writes them all."""

from __future__ import annotations

import csv
import io
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from dist_mem.evaluation.scores import DocumentScore, to_csv
from dist_mem.runtime.csv_text import csv_text
from tests.support.paths import PACKAGE

TITLES = st.text(st.sampled_from("=+-@\t\r\n '\",a1|.") | st.characters(codec="utf-8"), max_size=8)


@given(cells=st.lists(TITLES | st.integers() | st.floats(allow_nan=False), min_size=1, max_size=4))
def test_no_cell_is_a_formula_and_every_cell_is_kept(cells: list[str | int | float]) -> None:
    [row] = csv.reader(io.StringIO(csv_text([cells]), newline=""))
    for cell, written in zip(cells, row, strict=True):
        assert written in (str(cell), f"'{cell}")
        if re.match(" *[=+@\t\r\n-]", written):
            assert not math.isnan(float(written))


def test_titles_of_a_report_are_no_formulas() -> None:
    titles = ["=cmd|' /C calc'!A0", "@SUM(1+1)", "+1+cmd", "-2+3", "\t=1", " =1", "A -1 title", "1984"]
    documents = [DocumentScore(str(place), title, 1.0, 4, 1, 4) for place, title in enumerate(titles)]
    rows = list(csv.DictReader(io.StringIO(to_csv(documents), newline="")))
    assert [row["title"] for row in rows] == [*(f"'{title}" for title in titles[:6]), *titles[6:]]
    assert {row["nll"] for row in rows} == {"1.0"}


def test_one_module_writes_csv() -> None:
    writers = [path.name for path in PACKAGE.rglob("*.py") if re.search(r"csv\.(Dict)?[wW]riter", path.read_text())]
    assert writers == ["csv_text.py"]

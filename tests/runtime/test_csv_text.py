"""CSV files of the project: no cell is a formula, numbers stay numbers, and one function writes them all."""

from __future__ import annotations

import csv
import io
import math
import re

from hypothesis import given
from hypothesis import strategies as st

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


def test_one_module_writes_csv() -> None:
    writers = [path.name for path in PACKAGE.rglob("*.py") if re.search(r"csv\.(Dict)?[wW]riter", path.read_text())]
    assert writers == ["csv_text.py"]

"""The result pages, and README, have the numbers of the cells in docs/results; a row has the rate that was best."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from tests.support.paths import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(RESULTS)
    return importlib.import_module("write_pages")


@pytest.mark.core
@pytest.mark.pages
@pytest.mark.timeout(600)
def test_the_pages_have_the_numbers_of_the_cells(pages: ModuleType) -> None:
    for page in pages.PAGES:
        text = page.read_text(encoding="utf-8")
        assert pages.written(text) == text, f"{page}: run docs/results/write_pages.py"
    assert {name for page in pages.PAGES for name in re.findall(r"<!-- table (.+?) -->", page.read_text())} == {
        *pages.TABLES
    }


def test_every_interval_in_a_sentence_is_written_from_the_cells(pages: ModuleType) -> None:
    """One that is typed goes stale with the next seed."""
    for page in pages.PAGES:
        text = re.sub(r"<!-- .*?<!---->", "", page.read_text(encoding="utf-8"), flags=re.S)
        prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        assert not re.findall(r"\d\.\d{3}\s+to\s+\d\.\d{3}", prose), page


@pytest.mark.parametrize("name", ["arena", "headline", "convolution", "equal_text", "equal_seconds", "equal_bytes"])
def test_every_run_has_the_rate_that_was_best_on_validation(pages: ModuleType, name: str) -> None:
    """Of the trials of its own study, or of the arena where it has none."""
    found = pages.results(name)
    own, others = pages.trials(found, name), pages.trials(found, "arena")
    for row, cells in found.rows.items():
        tried = own[row] or others[row]
        assert len(tried) > 2, row
        assert {cell.body["definition"]["optimizer.lr"] for cell in cells} == {pages.best_rate(tried)}, row
        seeds = {cell.seed for of_rate in tried.values() for cell in of_rate}
        assert not seeds & {cell.seed for cell in cells}, row

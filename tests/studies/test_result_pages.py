"""The result pages, and README, have the numbers of the cells in docs/results; a row has the rate that was best."""

import importlib
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    "name",
    ["arena", "headline", "convolution", "equal_text", "equal_seconds", "equal_bytes", "recipes", "recipes_pg19"],
)
def test_every_run_has_the_rate_that_was_best_on_validation(pages: ModuleType, name: str) -> None:
    """Of the trials of its own study, or of the arena where it has none; on real books AdamW's are of an older one."""
    found = pages.results(name)
    own, others = pages.trials(found, name), pages.trials(found, "arena")
    for row, cells in found.rows.items():
        if name == pages.BOOKS and " with " not in row:
            continue
        tried = own[row] or others[row]
        assert len(tried) > 2, row
        assert {pages.rate_of(cell.body["definition"]) for cell in cells} == {pages.best_rate(tried)}, row
        seeds = {cell.seed for of_rate in tried.values() for cell in of_rate}
        assert not seeds & {cell.seed for cell in cells}, row


def test_tokens_to_a_loss_are_those_that_the_curves_say(pages: ModuleType) -> None:
    def cells(*steps: int) -> list[Any]:  # of each seed: a loss of 3 at once, and of 2 at this update
        evaluated = [{"evaluations": [[10, 3.0], [step, 2.0], [400, 2.0]]} for step in steps]
        return [pages.Cell(Path("cell.json"), seed, body) for seed, body in enumerate(evaluated)]

    found = SimpleNamespace(rows={"first": cells(400, 400), "half": cells(200, 200), "never": cells(500, 200)})
    found.rows["never"][0].body["evaluations"][1:] = [[400, 2.5]]
    assert pages.tokens_to_loss(found, "first", "half") == "0.50 (0.50 to 0.50)"
    assert pages.tokens_to_loss(found, "first", "never") == "not reached with 1 of 2 seeds"
    found.rows["noisy"] = cells(200, 200)  # has its last loss at half of its tokens
    assert pages.tokens_to_loss(found, "noisy", "noisy") == pages.tokens_to_loss(found, "noisy", "half")
    assert pages.tokens_to_loss(found, "noisy", "half") == "1.00 (1.00 to 1.00)"
    assert pages.share_until([(100, 3.0), (200, 2.0)], (400, 2.25)) == 0.4375, "between two evaluations"

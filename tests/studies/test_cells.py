"""Cells: what is kept of a run is what was measured, once, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import UnusableError
from dist_mem.evaluation.scores import DocumentScore, RecallScore, Report, write_report
from dist_mem.studies.cells import Run, checksum, keep_result, read_result, report_of
from tests.support.messages import refused

DOCUMENTS = [DocumentScore(str(place), "a title", 2.5 * place, 7, 3, 9, 4, 0.5) for place in range(3)]
REPORT = Report("test", "d", "t", None, 32, 0, 9, DOCUMENTS, [RecallScore(40, 2.0, 2, 1)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("xl over 2", "", 3, tmp_path)


def test_scores_are_kept_once_and_as_they_were(run: Run, tmp_path: Path) -> None:
    path = write_report(REPORT, tmp_path / "evaluations", "test-step-00000007", metadata={"step": 7})[1]
    for column in ("perplexity", "recall"):
        keep_result(run, column, {"value": 1.5, "step": 7}, path)
    keep_result(run, "dialogue", {"absent": "test/meteor", "step": 7})
    assert report_of(run, "perplexity") == report_of(run, "recall") == REPORT
    assert report_of(run, "dialogue") is None
    assert len(json.loads(run.cell.read_text())["reports"]) == 1
    other = write_report(REPORT, tmp_path / "evaluations", "validation-step-00000007", metadata={"step": 8})[1]
    keep_result(run, "again", {"value": 1.5, "step": 8}, other)  # the same scores
    assert checksum(report_of(run, "again") or REPORT) == checksum(REPORT)
    assert read_result(run, "dialogue") == {"absent": "test/meteor", "step": 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 99},
        {"results": {"perplexity": {"value": "low"}}},
        {"results": {"perplexity": {"value": 1.0, "report": "nowhere"}}},
        {"results": [], "more": 1},
        None,
    ],
)
def test_what_is_no_cell_is_refused(run: Run, changes: dict[str, Any] | None) -> None:
    keep_result(run, "perplexity", {"value": 1.0, "step": 7})
    text = run.cell.read_text()
    run.cell.write_text(text[:20] if changes is None else json.dumps({**json.loads(text), **changes}))
    with refused(UnusableError, run.cell, "remove the file"):
        report_of(run, "perplexity")

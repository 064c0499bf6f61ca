"""The page of an arena: which interval stands beside the first column, and which pictures are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_mem.evaluation.report import DocumentScore, RecallScore, Report, write_report
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.arena import SCALE, load_arena
from dist_mem.studies.arena_page import write_page
from dist_mem.studies.budget import Costs
from dist_mem.studies.job import Job
from dist_mem.studies.runs import all_runs, keep_result
from tests.studies.test_arena import write

COSTS = Costs(parameters=9, state_bytes=8, steps=7, tokens=6, flops=None)
RIGHT = {"none": 1, "transformer_xl": 2, "outside": 2}  # of the 2 scored tokens of each document, in half of them


def finished(folder: Path, figure: str, *, num_documents: int, depth: float | None) -> Job:
    """Return the job of an arena whose three memories have been evaluated with one seed."""
    band = {"band": [0]} if figure == "recall_accuracy" else {}
    arena, table = load_arena(write(folder, columns={"first": {"figure": figure, **band}}, seeds=[0]))
    scale = table.scales[SCALE]
    runs = all_runs(scale, folder / "out", [0], list(arena.memories))
    for run in runs:
        documents = [
            DocumentScore(str(place), "", 2.0, 2, 2, 2, RIGHT[run.row] if place % 2 else 2, depth)
            for place in range(num_documents)
        ]
        hits = sum(document.hits or 0 for document in documents)
        recall = [RecallScore(40, 2.0 * num_documents, 2 * num_documents, hits)]
        report = Report("test", "d", "t", None, 32, 0, 2 * num_documents, documents, recall)
        path = write_report(report, run.directory / "evaluations", "test-step-00000007", metadata={"step": 7})[1]
        keep_result(run, "first", {"value": 0.5, "step": 7, "report": str(path.relative_to(run.directory))})
    return Job(table, scale, folder / "out", runs, 1, [], StopSignal())


def page_of(job: Job) -> str:
    memories = list(RIGHT)
    write_page(job, memories, dict.fromkeys(memories, COSTS))
    return (job.out / "arena.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("figure", "heading", "interval", "sentence"),
    [
        ("word_perplexity", "none / memory, 95 %", "1.000 to 1.000", "contains 1 settles nothing"),
        ("accuracy", "memory - none, 95 %", "+0.175 to +0.325", "the memory's accuracy minus none's"),
        ("whole_answers", "memory - none, 95 %", "+0.350 to +0.650", "the memory's whole answers minus none's"),
        ("recall_accuracy", "none / memory, 95 %", "", "There is no interval"),
    ],
)
def test_the_interval_is_that_of_the_first_column(
    tmp_path: Path, figure: str, heading: str, interval: str, sentence: str
) -> None:
    text = page_of(finished(tmp_path, figure, num_documents=40, depth=None))
    assert f"| memory | first | {heading} |" in text
    assert f"| transformer_xl | 0.5 | {interval} |" in text
    assert sentence in text


def test_accuracy_by_depth_is_drawn_where_depths_are_known(tmp_path: Path) -> None:
    for folder, depth in (tmp_path / "books", None), (tmp_path / "passkey", 0.35):
        folder.mkdir()
        page_of(finished(folder, "accuracy", num_documents=40, depth=depth))
        assert [(folder / "out" / name).exists() for name in ("depth.png", "depth.csv")] == [depth is not None] * 2
    assert "transformer_xl,0.3,0.4,40,1.0\n" in (tmp_path / "passkey" / "out" / "depth.csv").read_text()


def test_a_picture_that_too_few_tokens_leave_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished(tmp_path, "accuracy", num_documents=20, depth=None)
    page_of(job)
    assert "recall.png is not drawn: fewer than 50 recall tokens" in capsys.readouterr().out
    assert not (job.out / "recall.png").exists()

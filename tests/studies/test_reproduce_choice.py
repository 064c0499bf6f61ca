"""Rows that are the best of others on validation, and recall between two distances."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.errors import UnusableError
from dist_mem.evaluation.report import DocumentScore, RecallScore, Report, write_report
from dist_mem.studies.results import cell, draw, to_csv, to_markdown
from dist_mem.studies.runs import (
    all_runs,
    figure_of,
    is_better_higher,
    keep_result,
    measured,
    runs_behind,
    shown_rows,
    with_done,
)
from dist_mem.studies.tables import RECALL, Column, Table, load_table

TABLE: dict[str, Any] = {
    "title": "t",
    "source": "s",
    "rows": {
        "xl": {"name": "XL"},
        "best": {"name": "Best", "best_of": ["small", "large", "elsewhere"], "paper": {"500": 0.5}},
        "small": {"name": "Small"},
        "large": {"name": "Large"},
        "elsewhere": {"name": "Elsewhere"},
    },
    "scales": {
        "tiny": {
            "about": "a",
            "rows": {"xl": [], "small": [], "large": []},
            "seeds": [0, 1],
            "points": {"a": {"data": "d"}, "b": {"data": "e"}},
            "columns": {
                "500": {"figure": "accuracy", "point": "a"},
                "1000": {"figure": "word_perplexity", "point": "b"},
            },
        }
    },
}


def load(folder: Path, content: dict[str, Any]) -> Table:
    (folder / "one.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_table("one", folder)


def test_a_row_shows_on_test_what_is_best_on_validation(tmp_path: Path) -> None:
    table = load(tmp_path, TABLE)
    scale = table.scales["tiny"]
    runs = all_runs(scale, tmp_path, [0, 1], list(scale.rows))
    assert shown_rows(table, scale) == ["xl", "best", "small", "large"]
    validation = {("small", 0): 0.3, ("large", 0): 0.2, ("small", 1): 0.1, ("large", 1): 0.4}
    test = {("small", 0): 0.25, ("large", 0): 0.9, ("small", 1): 0.9, ("large", 1): 0.35}
    for run in runs:
        assert list(measured(table, scale, run)) == (
            [name for name, column in scale.columns.items() if column.point == run.point]
            if run.row == "xl"
            else [
                text
                for name, column in scale.columns.items()
                if column.point == run.point
                for text in (f"{name} on validation", name)
            ]
        )
        if run.row != "xl":
            name = "500" if run.point == "a" else "1000"
            keep_result(run, name, {"value": test[run.row, run.seed], "step": 1})
            keep_result(run, f"{name} on validation", {"value": validation[run.row, run.seed], "step": 1})
    # More accuracy is better, ...
    assert [run.row for run in runs_behind(table, scale, runs, "best", "500")] == ["small", "large"]
    assert cell(runs_behind(table, scale, runs, "best", "500"), "500").values == [0.25, 0.35]
    # ... and less perplexity.
    assert [run.row for run in runs_behind(table, scale, runs, "best", "1000")] == ["large", "small"]
    text = to_markdown(table, scale, runs, {})
    assert "| Best | 0.3 ± 0.05 | 0.9 ± 0 |" in text
    assert "- Best, chosen on validation: 500: Small (seed 0); 500: Large (seed 1); 1000: Large (seed 0)" in text
    assert "not run at this scale: Elsewhere" in text
    assert "small,500 on validation,0,0.3,1,evaluated" in to_csv(table, scale, runs)
    draw(table, scale, runs, tmp_path / "table.png")


def test_nothing_is_chosen_before_all_are_measured(tmp_path: Path) -> None:
    table = load(tmp_path, TABLE)
    scale = table.scales["tiny"]
    runs = all_runs(scale, tmp_path, [0], list(scale.rows))
    for run in runs:
        if (run.row, run.point) == ("small", "a"):
            keep_result(run, "500", {"value": 0.3, "step": 1})
            keep_result(run, "500 on validation", {"value": 0.3, "step": 1})
    assert str(cell(runs_behind(table, scale, runs, "best", "500"), "500")) == "1 to run"


def test_a_candidate_that_no_call_has_asked_for_is_still_to_be_measured(tmp_path: Path) -> None:
    """`--rows small --seeds 1`, then the row in question for another seed: with seed 1 there is nothing to choose."""
    table = load(tmp_path, TABLE)
    scale = table.scales["tiny"]
    for rows, seed in ((["small"], 1), (["small", "large"], 0)):
        asked = all_runs(scale, tmp_path, [seed], rows)
        for run in asked:
            for name in measured(table, scale, run):
                keep_result(run, name, {"value": 0.3 if run.row == "small" else 0.4, "step": 1})
    runs = with_done(table, scale, tmp_path, asked)
    assert str(cell(runs_behind(table, scale, runs, "best", "500"), "500")) == "0.4, 1 to run"
    assert "chosen on validation: 500: Large (seed 0); 1000: Small (seed 0)\n" in to_markdown(table, scale, runs, {})


def test_a_candidate_is_measured_on_validation_first(tmp_path: Path) -> None:
    """Between the two its figure on test would stand for the best, of which nothing is known yet."""
    table = load(tmp_path, TABLE)
    scale = table.scales["tiny"]
    run = all_runs(scale, tmp_path, [0], ["small"])[0]
    assert [column.split for column in measured(table, scale, run).values()] == ["validation", "test"]


def test_one_that_diverged_is_not_chosen_where_another_has_not(tmp_path: Path) -> None:
    table = load(tmp_path, TABLE)
    scale = table.scales["tiny"]
    runs = [run for run in all_runs(scale, tmp_path, [0], ["small", "large"]) if run.point == "b"]
    for run in runs:
        facts: dict[str, Any] = {"diverged": "why"} if run.row == "small" else {"value": 9.0, "step": 1}
        for name in ("1000", "1000 on validation"):
            keep_result(run, name, facts)
    assert str(cell(runs_behind(table, scale, runs, "best", "1000"), "1000")) == "9"
    for name in ("1000", "1000 on validation"):
        keep_result(runs[1], name, {"diverged": "why"})
    assert str(cell(runs_behind(table, scale, runs, "best", "1000"), "1000")) == "1 diverged"


def test_what_a_table_cannot_mean_is_refused(tmp_path: Path) -> None:
    tiny = TABLE["scales"]["tiny"]
    asked = {**TABLE, "scales": {"tiny": {**tiny, "rows": {**tiny["rows"], "best": []}}}}
    with pytest.raises(UnusableError, match="'best', which is the best of other rows"):
        load(tmp_path, asked)
    unknown = {**TABLE, "rows": {**TABLE["rows"], "best": {"name": "Best", "best_of": ["smal"]}}}
    with pytest.raises(UnusableError, match=r"best\.best_of has 'smal'"):
        load(tmp_path, unknown)
    nested = {**TABLE, "rows": {**TABLE["rows"], "top": {"name": "Top", "best_of": ["xl", "best"]}}}
    with pytest.raises(UnusableError, match=r"top\.best_of has 'best', which has a best_of itself"):
        load(tmp_path, nested)
    for nothing in ("rows", "columns"):
        with pytest.raises(UnusableError, match=f"scales.tiny has no {nothing}"):
            load(tmp_path, {**TABLE, "scales": {"tiny": {**tiny, nothing: {}}}})


@pytest.mark.parametrize(
    ("figure", "band"),
    [("accuracy", [1, 2]), ("accuracy", [1, 2, 3])]
    + [(figure, band) for figure in RECALL for band in ([], [1, 2, 3], [256, 64], [64, 64])],
)
def test_a_band_is_refused_if_no_token_can_be_in_it(tmp_path: Path, figure: str, band: list[int]) -> None:
    columns = {"500": {"figure": figure, "point": "a", "band": band}}
    scales = {"tiny": {**TABLE["scales"]["tiny"], "columns": columns}}
    with pytest.raises(UnusableError, match=re.escape(f"one.yaml: scales.tiny: column '500' has band {band} and")):
        load(tmp_path, {**TABLE, "scales": scales})


def test_the_best_has_most_accuracy_and_least_perplexity() -> None:
    higher = ["accuracy", "recall_accuracy", "recall_accuracy_memory"]
    assert [name for name in [*higher, "recall_perplexity", "word_perplexity"] if is_better_higher(name)] == higher


@pytest.mark.parametrize("name", ["> 64", "(0, 32]", "a/b", "", "../x"])
def test_names_that_no_file_or_figure_can_have_are_refused(tmp_path: Path, name: str) -> None:
    tiny = TABLE["scales"]["tiny"]
    column = {"figure": "accuracy", "point": "a"}
    with pytest.raises(UnusableError, match=r"one\.yaml: scales\.tiny: column .* letters, digits"):
        load(tmp_path, {**TABLE, "scales": {"tiny": {**tiny, "columns": {name: column}}}})
    if name:  # the only point needs none
        with pytest.raises(UnusableError, match=r"one\.yaml: scales\.tiny: point .* letters, digits"):
            load(tmp_path, {**TABLE, "scales": {"tiny": {**tiny, "points": {**tiny["points"], name: {"data": "d"}}}}})
    with pytest.raises(UnusableError, match=r"one\.yaml: row .* letters, digits"):
        load(tmp_path, {**TABLE, "rows": {**TABLE["rows"], name: {"name": "Odd"}}})


def test_recall_is_read_between_two_distances(tmp_path: Path) -> None:
    recall = [RecallScore(10, 1.0, 1, 1), RecallScore(40, 4.0, 2, 1), RecallScore(90, 9.0, 3, 0)]
    report = Report("test", "a", "b", None, 32, 0, 4, [DocumentScore("d", "t", 14.0, 6, 4, 9)], recall)
    path = write_report(report, tmp_path, "test-step-00000007", metadata={"step": 7})[-1]

    def column(figure: str, *band: int) -> Column:
        return Column(figure=figure, band=list(band))

    for band, exponent, share in (((0, 32), 1.0, 1.0), ((32, 64), 2.0, 0.5), ((64,), 3.0, 0.0), ((32,), 13.0 / 5, 0.2)):
        value, step = figure_of(path, column("recall_perplexity", *band))
        assert value == pytest.approx(2.718281828459045**exponent)
        assert step == 7
        assert figure_of(path, column("recall_accuracy", *band)) == (share, 7)
    for figure in ("recall_perplexity", "recall_accuracy"):
        assert figure_of(path, column(figure, 200)) == (None, 7)

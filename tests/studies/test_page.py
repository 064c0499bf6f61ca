"""The results of a study: what its cells keep, its table, its pictures, and the best of rows on validation."""

import csv
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import UnusableError
from dist_mem.evaluation.scores import DocumentScore, PositionScore, RecallScore, Report
from dist_mem.runtime.file_schema import read_json
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.budget import Costs
from dist_mem.studies.cells import (
    CellRun,
    checksum,
    define,
    finish,
    give,
    keep_result,
    read_cell,
    read_result,
    report_of,
    take_over,
)
from dist_mem.studies.page import to_csv, to_markdown, write_results
from dist_mem.studies.pictures import are_equal, draw, pareto_front
from dist_mem.studies.results import RowResult, cell, standings
from dist_mem.studies.runs import all_runs, columns_to_measure, metric_of, rank_of, runs_behind, shown_rows, with_done
from dist_mem.studies.study import Column, Study
from dist_mem.studies.study_call import StudyCall
from tests.support.messages import refused
from tests.support.saved_reports import save_report
from tests.support.small_studies import ARENA, ROWS, at_tiny, load, two_memories

COSTS = Costs(parameters=9, state_bytes=8, steps=7, tokens=6, flops=None, all_flops=None)
RIGHT = {"none": 1, "transformer_xl": 2, "outside": 2}  # of the 2 scored tokens of each document, in half of them


def text_of(study: Study, runs: list[CellRun], row: str, column: str) -> str:
    return cell(runs_behind(study, runs, row, column), column).text()


def test_a_row_shows_on_test_what_is_best_on_validation(tmp_path: Path) -> None:
    study = load(tmp_path)
    runs = all_runs(study, tmp_path)
    assert shown_rows(study) == ["xl", "best", "small", "large"]
    validation = {("small", 0): 0.3, ("large", 0): 0.2, ("small", 1): 0.1, ("large", 1): 0.4}
    test = {("small", 0): 0.25, ("large", 0): 0.9, ("small", 1): 0.9, ("large", 1): 0.35}
    for run in runs:
        name = "500" if run.point == "a" else "1000"
        assert list(columns_to_measure(study, run)) == ([name] if run.row == "xl" else [f"{name} on validation", name])
        if run.row != "xl":
            keep_result(run, name, {"value": test[run.row, run.seed], "step": 1})
            keep_result(run, f"{name} on validation", {"value": validation[run.row, run.seed], "step": 1})
    # More accuracy is better, ...
    assert [run.row for run in runs_behind(study, runs, "best", "500")] == ["small", "large"]
    assert cell(runs_behind(study, runs, "best", "500"), "500").values == [0.25, 0.35]
    # ... and less perplexity.
    assert [run.row for run in runs_behind(study, runs, "best", "1000")] == ["large", "small"]
    text = to_markdown(study, runs, {"seeds": "0, 1"})
    assert "| Best | 0.300 ± 0.071 | 0.9 ± 0 |" in text
    assert "- Best, chosen on validation: 500: Small (seed 0); 500: Large (seed 1); 1000: Large (seed 0)" in text
    assert "not run at this scale: Elsewhere" in text
    assert "- seeds: 0, 1" in text
    assert "small,500 on validation,0,0.3,1,evaluated" in to_csv(study, runs, [])
    draw(study, runs, tmp_path / "table.png")


def test_nothing_is_chosen_before_all_that_calls_have_asked_for_are_measured(tmp_path: Path) -> None:
    """`--rows small --seeds 1`, then the row in question for another seed: with seed 1 there is nothing to choose."""
    study = load(tmp_path)
    assert text_of(study, all_runs(study, tmp_path, [0]), "best", "500") == "1 to run"
    for rows, seed in ((["small"], 1), (["small", "large"], 0)):
        asked = all_runs(study, tmp_path, [seed], rows)
        for run in asked:
            assert [column.split for column in columns_to_measure(study, run).values()] == ["validation", "test"]
            for name in columns_to_measure(study, run):
                keep_result(run, name, {"value": 0.3 if run.row == "small" else 0.4, "step": 1})
    runs = with_done(study, tmp_path, asked)
    assert text_of(study, runs, "best", "500") == "0.4, 1 to run"
    assert "chosen on validation: 500: Large (seed 0); 1000: Small (seed 0)\n" in to_markdown(study, runs, {})


def test_one_that_diverged_is_not_chosen_where_another_has_not(tmp_path: Path) -> None:
    study = load(tmp_path)
    runs = [run for run in all_runs(study, tmp_path, [0], ["small", "large"]) if run.point == "b"]
    for run in runs:
        facts: dict[str, Any] = {"diverged": "why"} if run.row == "small" else {"value": 9.0, "step": 1}
        for name in ("1000", "1000 on validation"):
            keep_result(run, name, facts)
    assert text_of(study, runs, "best", "1000") == "9"
    for name in ("1000", "1000 on validation"):
        keep_result(runs[1], name, {"diverged": "why"})
    assert text_of(study, runs, "best", "1000") == "1 diverged"


def test_a_row_is_chosen_among_those_of_a_point(tmp_path: Path) -> None:
    points = {"a": {"data": "d", "without": ["large"]}, "b": {"data": "e"}}
    study = load(tmp_path, scales=at_tiny(points=points))
    runs = all_runs(study, tmp_path, [0])
    for run in runs:
        for name in columns_to_measure(study, run):
            keep_result(run, name, {"value": 0.9 if run.row == "small" else 0.5, "step": 1})
    chosen = {name: [run.row for run in runs_behind(study, runs, "best", name)] for name in ("500", "1000")}
    assert chosen == {"500": ["small"], "1000": ["large"]}
    assert "| Large | - | 0.5 |" in to_markdown(study, runs, {})


def test_a_cell_says_how_many_of_its_seeds_diverged() -> None:
    assert RowResult([2.0, 3.0], diverged=1, absent=0, missing=2).text() == "2.50 ± 0.71, 1 diverged, 2 to run"
    assert RowResult([1.0], diverged=0, absent=0, missing=0).text() == "1"
    assert RowResult([], diverged=3, absent=1, missing=0).text() == "3 diverged, n/a"


BITS: dict[str, Any] = {"absent": "test/word_perplexity", "bits_per_byte": 2.5, "step": 1}


def test_a_perplexity_that_is_no_figure_is_shown_in_bits_and_not_drawn(tmp_path: Path) -> None:
    """`inf` stood in the table, and the picture had axes without a point."""
    study = load(tmp_path, two_memories("d", "tiny", seeds=[0, 1]))
    runs = all_runs(study, tmp_path)
    for run in runs:
        keep_result(run, "test", {**BITS, "bits_per_byte": 2.0 + run.seed})
    assert "| XL | n/a (2.5 bits per byte) |" in to_markdown(study, runs, {})
    assert not draw(study, runs, tmp_path / "table.png") and not (tmp_path / "table.png").exists()


def test_names_with_bars_and_dollars_are_parts_of_tables_and_pictures(tmp_path: Path) -> None:
    name = "a|b $x$ <i>日本"
    study = load(tmp_path, two_memories("d", "tiny", seeds=[0]))
    study.rows["xl"].name = name
    study.columns = {name: study.columns["test"]}
    runs = all_runs(study, tmp_path)
    for run in runs:
        keep_result(run, name, {"value": 7.0, "step": 1})
    lines = to_markdown(study, runs, {}).splitlines()
    assert r"| a\|b $x$ &lt;i>日本 | 7 |" in lines
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, runs, tmp_path / "table.png")


LOWER = {"value": 3.0, "step": 1}


def test_results_are_ranked_by_their_values_then_in_bits() -> None:
    diverged = {"diverged": "why"}
    ordered = [[LOWER], [{"value": 4.0}], [BITS], [{**BITS, "bits_per_byte": 3.0}], [diverged]]
    ranks = [rank_of(results, "word_perplexity") for results in ordered]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    assert rank_of([LOWER, BITS], "word_perplexity") > rank_of([{"value": 9.0}] * 2, "word_perplexity")
    assert rank_of([LOWER, diverged], "word_perplexity") == rank_of([None], "accuracy") == ranks[-1]
    assert rank_of([{"value": 0.9}], "accuracy") < rank_of([{"value": 0.1}], "accuracy")


def at_each_scale(folder: Path) -> dict[str, tuple[Study, list[CellRun]]]:
    """Return a study at two scales with results of two seeds, and a figure of the paper."""
    found = {}
    for name in ("tiny", "paper"):
        study = load(folder, two_memories("d", name, seeds=[0, 1]))
        runs = all_runs(study, folder / name)
        for run in runs:
            keep_result(run, "test", {"value": 7.0 + run.seed, "step": 1})
        found[name] = study, runs
    return found


def test_the_papers_figures_stand_beside_ours_at_its_scale_only(tmp_path: Path) -> None:
    texts = {name: (to_markdown(*found, {}), to_csv(*found, [])) for name, found in at_each_scale(tmp_path).items()}
    assert "|  | test, paper | test, ours |" in texts["paper"][0]
    assert "| None | 1.5 | 7.50 ± 0.71 |" in texts["paper"][0]
    assert "none,test,0,1.5,7.0,1,evaluated" in texts["paper"][1]
    ours, _, papers = texts["tiny"][0].partition("## The paper's metrics")
    assert "1.5" not in ours
    assert "| None | 7.50 ± 0.71 |" in ours
    assert "| None | 1.5 |" in papers
    assert "not comparable" in papers
    assert "none,test,0,7.0,1,evaluated" in texts["tiny"][1]


def test_the_picture_has_the_range_of_seeds_and_the_papers_points_at_its_scale_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig

    def noted(figure: Figure, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    legends = {}
    for name, (study, runs) in at_each_scale(tmp_path).items():
        draw(study, runs, tmp_path / f"{name}.png")
        (axes,) = drawn[-1].axes
        legends[name] = {text.get_text() for text in axes.figure.legends[0].get_texts()}
        bars = [collection for collection in axes.collections if isinstance(collection, LineCollection)]
        ranges = [tuple(segment[:, 1]) for collection in bars for segment in collection.get_segments()]
        assert ranges == [(7.0, 8.0), (7.0, 8.0)]
    assert legends == {"tiny": {"None", "XL"}, "paper": {"None", "XL", "the paper's"}}


def test_recall_is_read_between_two_distances(tmp_path: Path) -> None:
    recall = [RecallScore(10, 1.0, 1, 1), RecallScore(40, 4.0, 2, 1), RecallScore(90, 9.0, 3, 0)]
    report = Report("test", "a", "b", None, 32, 0, 4, [DocumentScore("d", "t", 14.0, 6, 4, 9)], recall)
    path = save_report(report, tmp_path, "test-step-00000007", step=7)[-1]

    def column(figure: str, *band: int) -> Column:
        return Column(metric=figure, band=list(band))

    for band, exponent, share in (((0, 32), 1.0, 1.0), ((32, 64), 2.0, 0.5), ((64,), 3.0, 0.0), ((32,), 13.0 / 5, 0.2)):
        value, step = metric_of(path, column("recall_perplexity", *band))
        assert value == pytest.approx(2.718281828459045**exponent)
        assert step == 7
        assert metric_of(path, column("recall_accuracy", *band)) == (share, 7)
    for figure in ("recall_perplexity", "recall_accuracy"):
        assert metric_of(path, column(figure, 200)) == (None, 7)


def finished(folder: Path, figure: str, *, num_documents: int, depth: float | None, **keys: Any) -> StudyCall:
    """Return the job of an arena, with more keys, whose three memories have been evaluated; seed s adds s nats."""
    options: dict[str, dict[str, Any]] = {
        "recall_accuracy": {"band": [0]},
        "position_perplexity": {"band": [7], "evaluate": ["--by", "position"]},
    }
    rows = {**ROWS, "outside": ["memory.kind=mine.py:Mine"]}
    keys = {"seeds": [0], "rows": rows, **keys}
    study = load(folder, ARENA, columns={"first": {"metric": figure, **options.get(figure, {})}}, **keys)
    runs = all_runs(study, folder / "out")
    for run in runs:
        documents = [
            DocumentScore(str(place), "", 2.0 + run.seed, 2, 2, 2, RIGHT[run.row] if place % 2 else 2, depth)
            for place in range(num_documents)
        ]
        hits = sum(document.hits or 0 for document in documents)
        recall = [RecallScore(40, 2.0 * num_documents, 2 * num_documents, hits)]
        positions = [PositionScore(place, number, 1.0, 1) for place in range(num_documents) for number in (2, 3)]
        positions = positions if figure == "position_perplexity" else []
        report = Report("test", "d", "t", None, 32, 0, 2 * num_documents, documents, recall, positions)
        path = save_report(report, run.directory / "evaluations", "test-step-00000007", step=7)[1]
        keep_result(run, "first", {"value": 0.5, "step": 7}, path)
    return StudyCall(study, folder / "out", runs, 1, [], StopSignal(), costs=dict.fromkeys(rows, COSTS))


@pytest.mark.parametrize(
    ("figure", "heading", "interval", "sentence"),
    [
        ("word_perplexity", "none / memory, 95 %", "1.000 to 1.000 (documents only)", "contains 1 settles nothing"),
        ("accuracy", "memory - none, 95 %", "+0.175 to +0.325 (documents only)", "the memory's accuracy minus none's"),
        (
            "whole_answers",
            "memory - none, 95 %",
            "+0.350 to +0.650 (documents only)",
            "the memory's whole answers minus none's",
        ),
        ("bits_per_byte", "none - memory, 95 %", "+0.000 to +0.000 (documents only)", "contains 0 settles nothing"),
        ("recall_accuracy", "none / memory, 95 %", "", "There is no interval"),
        (
            "position_perplexity",
            "none / memory, 95 %",
            "1.000 to 1.000 (documents only)",
            "none's perplexity at the positions of the first column divided by the memory's",
        ),
    ],
)
def test_the_interval_is_that_of_the_first_column(
    tmp_path: Path, figure: str, heading: str, interval: str, sentence: str
) -> None:
    text = write_results(finished(tmp_path, figure, num_documents=40, depth=None), {})[0].read_text(encoding="utf-8")
    assert f"|  | first | {heading} |" in text
    assert f"| transformer_xl | 0.5 | {interval} | 9 | 8 | 7 | 6 | n/a | n/a |" in text
    assert sentence in text


def test_the_best_of_other_rows_stands_in_an_arena_with_the_costs_of_the_one_that_was_chosen(tmp_path: Path) -> None:
    """Their row was left out, with the costs of the first of them in the picture."""
    candidates = ["transformer_xl", "outside"]
    rows = {**ROWS, "outside": ["memory.kind=mine.py:Mine"], "best": {"best_of": candidates}}
    job = finished(tmp_path, "accuracy", num_documents=40, depth=None, rows=rows)
    for run in job.runs:
        if run.row in candidates:
            keep_result(run, "first on validation", {"value": 0.1 + (run.row == "outside"), "step": 7})
    job.costs["outside"] = COSTS._replace(state_bytes=77)
    text = write_results(job, {})[0].read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if line.startswith(("| none", "| best", "| outside", "| transformer"))]
    assert len(shown) == 2
    assert "| best | 0.5 | +0.175 to +0.325 (documents only) | 9 | 77 | 7 | 6 | n/a | n/a |" in text


@pytest.mark.parametrize("paired", [False, True])
def test_what_a_seed_does_to_all_rows_is_no_difference_of_paired_ones(tmp_path: Path, paired: bool) -> None:
    job = finished(tmp_path, "word_perplexity", num_documents=9, depth=None, seeds=[0, 1, 2], paired=paired)
    text = write_results(job, {})[0].read_text(encoding="utf-8")
    assert ("| 1.000 to 1.000 |" in text) == ("Rows are compared seed by seed." in text) == paired


def test_a_row_of_which_a_seed_diverged_is_not_the_best(tmp_path: Path) -> None:
    """It stood first and bold, by the seeds that were left; best_of and tune have always ranked it last."""
    job = finished(tmp_path, "word_perplexity", num_documents=4, depth=None, seeds=[0, 1])
    for run in job.runs:
        if run.row == "outside":
            keep_result(run, "first", {"value": 0.1, "step": 7} if run.seed else {"diverged": "why"})
    text = write_results(job, {})[0].read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| none", "| outside", "| transformer"))]
    assert rows[0].startswith("| none | **0.5 ± 0** |") and rows[-1].startswith("| outside | 0.1, 1 diverged |")


@pytest.mark.parametrize("rows", [["none", "transformer_xl"], ["transformer_xl", "outside"]])
def test_a_table_of_two_rows_compares_them_and_has_no_mark(tmp_path: Path, rows: list[str]) -> None:
    """Without the first row of the file there was no interval; one alone needs no correction, and its mark no key."""
    job = finished(tmp_path, "accuracy", num_documents=40, depth=None, seeds=[0, 1, 2])
    job.runs = [run for run in job.runs if run.row in rows]
    text = write_results(job, {})[0].read_text(encoding="utf-8")
    assert f"memory - {rows[0]}, 95 %" in text and "\u2020" not in text
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {rows[1]} |"))
    assert (" to +" in line) and "documents only" not in line


def test_a_cell_has_the_commands_and_the_checksum_of_its_evaluation(tmp_path: Path) -> None:
    job = finished(tmp_path, "accuracy", num_documents=4, depth=None)
    first, *_ = csv.DictReader(to_csv(job.study, job.runs, ["eval.allow_code=true"]).splitlines())
    documents = [DocumentScore(str(place), "", 2.0, 2, 2, 2, 1 if place % 2 else 2, 0.5) for place in range(4)]
    assert first["sha256"] == checksum(Report("test", "d", "t", None, 32, 0, 8, documents, []))
    assert first["sha256"].startswith("51d149f1b6e0")
    run = f"{tmp_path}/out/runs/none-seed0"
    assert first["training"].startswith("dist-mem train job.yaml memory.kind=none data.path=books train.seed=0")
    assert first["training"].endswith(f"run_dir={run} eval.allow_code=true")
    assert first["evaluation"] == f"dist-mem evaluate {run} --split test eval.allow_code=true"
    ranked, *_ = csv.DictReader(to_csv(job.study, job.runs, [], ranks=4).splitlines())
    assert ranked["training"].startswith("torchrun --nproc_per_node 4 -m dist_mem train job.yaml")


def test_a_table_reads_each_cell_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was parsed dozens of times: the table of 24 runs of 5,000 documents took a minute."""
    job = finished(tmp_path, "accuracy", num_documents=4, depth=None, seeds=[0, 1])
    read: list[Path] = []

    def counted(path: Path, *rest: Any) -> Any:
        read.append(path)
        return read_json(path, *rest)

    monkeypatch.setattr("dist_mem.studies.cells.read_json", counted)
    to_markdown(job.study, job.runs, {})
    to_csv(job.study, job.runs, [])
    assert len(read) == len(set(read)) == len(job.runs)
    keep_result(job.runs[0], "first", {"value": 0.75, "step": 8})
    assert read_result(job.runs[0], "first") == {"value": 0.75, "step": 8}
    job = finished(tmp_path, "accuracy", num_documents=1, depth=None, seeds=[*range(11)])  # more than 32
    reads = []
    for _ in range(2):
        read.clear()
        to_markdown(job.study, job.runs, {}, standings(job.study, job.runs, job.costs))
        reads.append(len(read))
        job.study.columns |= {f"column {number}": job.study.columns["first"] for number in range(8)}
    assert reads[1] <= reads[0] <= 4 * len(job.runs), "by column, each was read again"


def test_accuracy_by_depth_is_drawn_where_depths_are_known(tmp_path: Path) -> None:
    for folder, depth in (tmp_path / "books", None), (tmp_path / "passkey", 0.35):
        folder.mkdir()
        write_results(finished(folder, "accuracy", num_documents=40, depth=depth), {})
        assert [(folder / "out" / name).exists() for name in ("depth.png", "depth.csv")] == [depth is not None] * 2
    assert "transformer_xl,0.3,0.4,40,1.0\n" in (tmp_path / "passkey" / "out" / "depth.csv").read_text()


def test_a_picture_that_too_few_tokens_leave_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished(tmp_path, "accuracy", num_documents=20, depth=None)
    write_results(job, {})
    assert "recall.png is not drawn: fewer than 50 recall tokens" in capsys.readouterr().out
    assert not (job.out / "recall.png").exists()


def test_the_front_has_whom_nobody_beats_in_both() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 6.0), (3.0, 7.0), (4.0, 5.0), (5.0, 1.0)]
    assert pareto_front(points, higher=False) == [(1.0, 9.0), (2.0, 5.0), (5.0, 1.0)]
    assert pareto_front([(x, -y) for x, y in points], higher=True) == [(1.0, -9.0), (2.0, -5.0), (5.0, -1.0)]


def test_a_cost_that_the_budget_made_equal_is_known() -> None:
    assert are_equal([2.00e12, 1.99e12, None])
    assert are_equal([0, 0])
    assert not are_equal([2.0e12, 1.9e12])
    assert not are_equal([0, 100])
    assert not are_equal([5.0, None])


DOCUMENTS = [DocumentScore(str(place), "a title", 2.5 * place, 7, 3, 9, 4, 0.5) for place in range(3)]
REPORT = Report("test", "d", "t", None, 32, 0, 9, DOCUMENTS, [RecallScore(40, 2.0, 2, 1)])


@pytest.fixture
def small_run(tmp_path: Path) -> CellRun:
    return CellRun("xl over 2", "", 3, tmp_path)


def test_scores_are_kept_once_and_as_they_were(small_run: CellRun, tmp_path: Path) -> None:
    path = save_report(REPORT, tmp_path / "evaluations", "test-step-00000007", step=7)[1]
    for column in ("perplexity", "recall"):
        keep_result(small_run, column, {"value": 1.5, "step": 7}, path)
    keep_result(small_run, "dialogue", {"absent": "test/meteor", "step": 7})
    assert report_of(small_run, "perplexity") == report_of(small_run, "recall") == REPORT
    assert report_of(small_run, "dialogue") is None
    assert len(json.loads(small_run.cell.read_text())["reports"]) == 1
    other = save_report(REPORT, tmp_path / "evaluations", "validation-step-00000007", step=8)[1]
    keep_result(small_run, "again", {"value": 1.5, "step": 8}, other)  # the same scores
    assert checksum(report_of(small_run, "again") or REPORT) == checksum(REPORT)
    assert read_result(small_run, "dialogue") == {"absent": "test/meteor", "step": 7}


def test_no_cell_of_a_folder_is_replaced_by_another_definition_or_by_fewer_results(
    small_run: CellRun, tmp_path: Path
) -> None:
    """What another sitting had trained and measured was gone, with exit code 0."""
    path = save_report(REPORT, tmp_path / "evaluations", "test-step-00000007", step=7)[1]
    column, folder = {"metric": "accuracy"}, tmp_path / "kept"

    def finished_run(out: str, name: str, **definition: Any) -> CellRun:
        run = replace(small_run, out=tmp_path / out)
        define(run, {"train.steps": 40, **definition})
        keep_result(run, name, {"value": 1.5, "step": 7, "column": column}, path)
        finish(run, date="today")
        return run

    same = {"train.steps": 40}
    first, second = finished_run("first", "recall"), finished_run("second", "test")
    give(first, folder, same)
    give(second, folder, same)
    there = replace(small_run, out=tmp_path / "there")
    assert take_over(there, folder, same)
    kept = read_cell(there.cell)
    assert kept["results"].keys() == {"recall", "test"}
    assert report_of(there, "recall") == report_of(there, "test") == REPORT
    other = finished_run("other", "recall", **{"train.steps": 50})
    column["metric"] = "whole_answers"
    for run, definition, named in (
        (other, {"train.steps": 50}, "train.steps was 40 and is 50"),
        (finished_run("third", "recall"), same, "column 'recall'"),
    ):
        for change in (take_over, give):
            with refused(UnusableError, folder / run.cell.name, named):
                change(run, folder, definition)
    assert read_cell(folder / small_run.cell.name) == kept


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
def test_what_is_no_cell_is_refused(small_run: CellRun, changes: dict[str, Any] | None) -> None:
    keep_result(small_run, "perplexity", {"value": 1.0, "step": 7})
    text = small_run.cell.read_text()
    small_run.cell.write_text(text[:20] if changes is None else json.dumps({**json.loads(text), **changes}))
    with refused(UnusableError, small_run.cell, "remove the file"):
        report_of(small_run, "perplexity")

"""The definition of a study: its rows, grid, scales, budget and tuning; what `--check` lists, and what is refused."""

import math
import re
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_mem.__main__ import main
from dist_mem.block import model_spec
from dist_mem.config import Config, load_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.estimate.counting import flops_per_token
from dist_mem.estimate.dry_run import check_model
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.memory import memory_options
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.budget import apply_budget, fit_budget
from dist_mem.studies.cells import keep_result
from dist_mem.studies.row_check import check
from dist_mem.studies.run_study import StudyRequest
from dist_mem.studies.runs import all_runs, is_better_higher, rows_behind, train_words
from dist_mem.studies.study import FOLDER, MEASURES, RECALL, load_study, study_names, study_path
from dist_mem.studies.study_call import StudyCall
from dist_mem.studies.tuning import Grid, choose_best, grids_of, trials_of, widen
from tests.support.jobs import build_books, write_config
from tests.support.messages import refused, said
from tests.support.paths import ROOT
from tests.support.small_studies import ARENA, ROWS, STUDY, SWEEP, at_tiny, load, two_memories, write

SIZES = ["data.path=absent", "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "train.seg_len=8"]
SIZES += ["train.steps=1"]


def test_every_combination_is_a_row_with_a_name_of_its_own(tmp_path: Path) -> None:
    found = load(tmp_path, SWEEP, rows={"odd": ["model.d_model=32"]}).trained_rows
    assert list(found) == [
        "none-lr0.001-dropout0.0", "none-lr0.002-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0",
        "odd",
    ]  # fmt: skip
    assert found["long-lr0.002-dropout0.0"] == ["memory/long.yaml", "optimizer.lr=0.002", "model.dropout=0.0"]


def test_combinations_with_all_values_of_a_condition_are_left_out(tmp_path: Path) -> None:
    found = load(tmp_path, SWEEP, skip=[{"memory": "none", "optimizer.lr": 0.002}]).trained_rows
    assert list(found) == ["none-lr0.001-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0"]


def test_overrides_that_belong_together_are_one_value(tmp_path: Path) -> None:
    size = ["model.d_model=64", "model.num_heads=4"]
    assert load(tmp_path, SWEEP, grid={"size": [size], "train.compile": [True, None]}).trained_rows == {
        "sizemodel.d_model_64_model.num_heads_4-compileTrue": [*size, "train.compile=true"],
        "sizemodel.d_model_64_model.num_heads_4-compileNone": [*size, "train.compile=null"],
    }


def test_what_a_file_does_not_say(tmp_path: Path) -> None:
    sweep, arena = load(tmp_path, SWEEP), load(tmp_path, ARENA)
    assert (sweep.title, sweep.source, sweep.seeds) == ("one", f"dist-mem sweep {tmp_path}/one.yaml", [0])
    assert (arena.title, arena.source, arena.seeds) == ("one", f"dist-mem arena {tmp_path}/one.yaml", [0, 1, 2])
    assert [(name, column.split) for name, column in sweep.columns.items()] == [("word_perplexity", "validation")]
    assert list(load(tmp_path, SWEEP, columns={"a": {"metric": "accuracy"}}).columns) == ["a"]


def test_a_scale_stands_in_place_of_the_studys_own_settings(tmp_path: Path) -> None:
    scales = {**at_tiny(), "small": {"rows": {"xl": ["memory.mem_len=8"]}, "points": {"": {"data": "d"}}}}
    path = write(tmp_path, STUDY, scales=scales, columns={"all": {"metric": "accuracy"}})
    first, small = load_study(path), load_study(path, "small")
    assert (first.scale, list(first.trained_rows)) == ("tiny", ["xl", "small", "large"])
    assert list(first.columns) == ["500", "1000"]
    assert (small.scale, small.trained_rows, list(small.columns)) == ("small", {"xl": ["memory.mem_len=8"]}, ["all"])
    with refused(UnusableError, "one.yaml", "scale 'big'", "tiny, small"):
        load_study(path, "big")
    with refused(UnusableError, "one.yaml", "scale 'tiny'", "none"):
        load_study(write(tmp_path, SWEEP), "tiny")


def test_a_run_has_the_settings_of_its_row_its_point_and_its_seed(tmp_path: Path) -> None:
    points = {"a": {"data": "d", "train": ["x=1"], "without": ["xl"]}, "b": {"data": "e"}}
    rows = {"xl": ["y=1"], "small": ["data.path=own"], "large": []}
    study = load(tmp_path, scales=at_tiny(train=["z=1"], points=points, rows=rows))
    runs = all_runs(study, Path("out"), [3])
    names = ["small-a-seed3", "large-a-seed3", "xl-b-seed3", "small-b-seed3", "large-b-seed3"]
    assert [run.name for run in runs] == names
    words = ["z=1", "data.path=own", "x=1", "data.path=own", "train.seed=3", "data.seed=3", f"name={names[0]}"]
    assert train_words(study, runs[0], ["w=1"]) == [*words, f"run_dir=out/runs/{names[0]}", "w=1"]
    assert rows_behind(study, "best", "a") == ["small", "large"]


def test_files_that_come_with_dist_mem_are_found_outside_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(load_study("configs/sweeps/memories.yaml").trained_rows) == ["none", "transformer_xl", "compressive"]
    assert load_study("recall").title.startswith("What is read")
    with refused(UnusableError, "no table 'three'"):
        load_study("three")


def test_more_runs_are_taken_if_the_command_allows_them(tmp_path: Path) -> None:
    assert len(load_study(write(tmp_path, SWEEP, seeds=[*range(300)]), max_runs=1200).seeds) == 300


TINY = STUDY["scales"]["tiny"]
# A study, and what changes it, each with the begin of what is wrong.
POSITIONS = {**{"metric": "position_perplexity", "point": "a", "band": [8191]}, **{"evaluate": ["--by", "position"]}}
FITTED: dict[str, Any] = {"budget": {"tokens": 5000, "params": 9}, "fit": {"params": "model.d_inner"}}
MEANINGLESS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "a sweep": (
        SWEEP,
        [
            ("skip[0] has 'memroy'", {"skip": [{"memroy": "none"}]}),
            ("skip[0]: optimizer.lr", {"skip": [{"optimizer.lr": 0.1}]}),
            ("grid.optimizer.lr", {"grid": {"optimizer.lr": []}}),
            ("rows is empty", {"grid": {}}),
            ("two rows are called 'x'", {"grid": {"memory": ["a/x.yaml", "b/x.yaml"]}}),
            ("two rows are called 'x'", {"grid": {"memory": ["a/x.yaml"]}, "rows": {"x": []}}),
            ("sedes", {"sedes": [1]}),
            (
                "rows has 'a' and 'a-b', at 'b-c' and 'c'",
                {"rows": {"a": [], "a-b": []}, "points": {"b-c": {"data": "d"}, "c": {"data": "d"}}, "data": None},
            ),
            ("train.seed=7", {"train": ["job.yaml", "train.seed=7"]}),
            ("name=one", {"rows": {"a": ["name=one"]}}),
            ("row 'a/b'", {"rows": {"a/b": []}}),
            ("rows has 'a'", {"rows": {"a": {"train": [], "best_of": ["b"]}, "b": []}}),
            ("data is not set", {"data": None}),
            *((f"seeds is {seeds}", {"seeds": seeds}) for seeds in ([0, 0], [-1], [])),
            ("column 'a' has metric 'acuracy'", {"columns": {"a": {"metric": "acuracy"}}}),
            *(
                (f"column 'a' has {what}", {"columns": {"a": {"metric": "accuracy", "command": command}}})
                for command, what in (("dialogue", "metric 'accuracy'"), ("train", "command 'train'"))
            ),
            ("column 'a' is not a number", {"columns": {"a": {"metric": "accuracy"}}, "x_axis": "n"}),
            ("figures.lamemo.fig7", {"figures": {"lamemo.fig7": ["lamemo"]}}),
            ("1,280,000,000 combinations", {"grid": {f"model.k{number}": [*range(20)] for number in range(7)}}),
            ("4 combinations and rows with 300 seeds", {"seeds": [*range(300)]}),
        ],
    ),
    "a budget that cannot be kept": (
        {**ARENA, "columns": {}},
        [
            ("rows has 1", {"rows": {"none": []}}),
            ("budget", {"budget": {}, "fit": {"params": "model.d_inner"}}),
            ("budget must have exactly one", {"budget": {"tokens": 1, "flops": 1}}),
            ("budget has 'hours'", {"budget": {"tokens": 5, "hours": 1}}),
            ("params must be both in budget", {"budget": {"tokens": 5, "params": 9}}),
            *(
                (f"fit.params has the row '{row}'", {**FITTED, "rows": rows, "fit": {"params": {row: "model.d_inner"}}})
                for row, rows in (("nonee", ROWS), ("xl", {**ROWS, "xl": [], "best": {"best_of": ["xl"]}}))
            ),
            *((f"budget.tokens is {amount:g}", {"budget": {"tokens": amount}}) for amount in (-5, math.inf, math.nan)),
            (
                "points has 2",
                {
                    "points": {name: {"data": name} for name in "ab"},
                    "data": None,
                    "columns": {"a": {"metric": "accuracy", "point": "a"}},
                },
            ),
            ("columns.far.evaluate", {"columns": {"far": {"metric": "accuracy", "evaluate": ["data.path=data/far"]}}}),
            ("rows.far has 'data.path=data/far'", {"rows": {**ROWS, "far": ["data.path=data/far"]}}),
        ],
    ),
    "a table": (
        STUDY,
        [
            ("scales.tiny.rows has 'best'", {"scales": at_tiny(rows={**TINY["rows"], "best": []})}),
            ("scales.tiny.rows has 'xll'", {"scales": at_tiny(rows={"xll": []})}),
            ("scales.tiny.rows is empty", {"scales": at_tiny(rows={})}),
            ("rows.best.best_of", {"rows": {**STUDY["rows"], "best": {"best_of": ["smal"]}}}),
            ("rows.top.best_of", {"rows": {**STUDY["rows"], "top": {"best_of": ["xl", "best"]}}}),
            ("rows.xl.sizes", {"rows": {**STUDY["rows"], "xl": {"sizes": {"bytes": 1.0}}}}),
            ("scales.tiny.points lacks 'a'", {"scales": at_tiny(points={"other": {"data": "x"}})}),
            *(
                (f"scales.tiny.{what}", {"scales": at_tiny(points={n: {"data": "d", "without": [row]} for n in "ab"})})
                for row, what in (("xll", "points.a.without has 'xll'"), ("xl", "rows has 'xl'"))
            ),
        ],
    ),
    "a band in which no token can be": (
        STUDY,
        [
            (
                f"scales.tiny.column '500' has band {band} and metric {figure}",
                {"scales": at_tiny(columns={"500": {"metric": figure, "point": "a", "band": band}})},
            )
            for figure in ("accuracy", *RECALL)
            for band in ([[1, 2], [1, 2, 3]] if figure == "accuracy" else [[], [1, 2, 3], [256, 64], [64, 64]])
        ]
        + [
            (f"scales.tiny.column '500' has {odd}", {"scales": at_tiny(columns={"500": {**POSITIONS, **changes}})})
            for odd, changes in (
                ("8192 in its band: positions are in octaves, write 16383 or 8191", {"band": [8192, 32767]}),
                ("metric position_perplexity: begin its evaluate with", {"evaluate": []}),
            )
        ],
    ),
}


@pytest.mark.parametrize("kind", MEANINGLESS)
def test_what_a_file_cannot_mean_is_refused(tmp_path: Path, kind: str) -> None:
    content, wrong = MEANINGLESS[kind]
    for named, changes in wrong:
        with refused(UnusableError, f"one.yaml: {named}"):
            load(tmp_path, content, **changes)


def test_an_arena_has_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", write(tmp_path, SWEEP)]) == EXIT_USAGE
    said(capsys.readouterr().err, "one.yaml", "no budget")


@pytest.mark.parametrize("name", ["> 64", "(0, 32]", "a/b", "", "../x"])
def test_names_that_no_file_or_figure_can_have_are_refused(tmp_path: Path, name: str) -> None:
    wrong: list[dict[str, Any]] = [{"scales": at_tiny(columns={name: {"metric": "accuracy", "point": "a"}})}]
    wrong.append({"rows": {**STUDY["rows"], name: {"name": "Odd"}}})
    if name:  # the only point needs none
        wrong.append({"scales": at_tiny(points={**TINY["points"], name: {"data": "d"}})})
    for changes in wrong:
        with refused(UnusableError, "one.yaml: ", f" {name!r} names files and metrics"):
            load(tmp_path, **changes)


def test_the_best_has_most_accuracy_and_least_perplexity() -> None:
    """Of the leaked and of the other conversations, the least F1, ROUGE and METEOR was the best."""
    metrics = [metric for measured in MEASURES.values() for metric in measured]
    lower = [metric for metric in metrics if any(part in metric for part in ("perplexity", "bits_per", "error"))]
    assert [metric for metric in metrics if not is_better_higher(metric)] == lower


def config_of(words: Sequence[str]) -> Config:
    return load_config([*SIZES, *words], memory_options=memory_options)


def test_a_budget_is_met_up_to_one_update_and_one_unit_of_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = {"params": "model.d_inner", "state_bytes": {"transformer_xl": "memory.mem_len"}}
    wanted = {"flops": 1e10, "params": 560_000, "state_bytes": 4_096}
    study = load(tmp_path, ARENA, train=[], budget=wanted, fit=fit)
    costs = apply_budget(study, config_of)
    assert list(costs) == list(study.trained_rows)
    for row, words in study.trained_rows.items():
        config = config_of(words)
        found, train = check_model(config), config.train
        of_token = flops_per_token(model_spec(config, vocab_size_of(config.data, config.model))).training
        update = train.global_batch_size * train.seg_len * train.segments_per_update * of_token
        steps = train.steps or 0
        assert 0 <= wanted["flops"] - steps * update < update
        assert costs[row].flops == steps * update
        assert abs(found["num_parameters"] - wanted["params"]) <= 8 * 2 * (2 * 16 + 1) / 2  # 8 units of d_inner
        of_xl = row.startswith("transformer_xl")
        assert abs(found["state_bytes_per_lane"] - (4_096 if of_xl else 0)) <= 8 * 16 * 4 * 2 / 2 + 2 * 8  # 8 rows
    again = load(tmp_path, ARENA, train=SIZES, budget=wanted, fit=fit)
    assert check(again, rows=(), ranks=1, extra=[]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert [row for row, cost in costs.items() if f" steps={cost.steps}" not in printed] == []
    words = ROWS["none"]
    later = [*words, "data.curriculum=[{path: short, until: 900}]"]  # after the one step of SIZES
    assert fit_budget("none", later, {"tokens": 1e6}, {}, config_of)[1].steps > 900
    with refused(UnusableError, "less than one update"):
        fit_budget("none", words, {"tokens": 3}, {}, config_of)
    with refused(UnusableError, "budget.params", "model.d_inner"):
        fit_budget("none", words, {"tokens": 1e6, "params": 9}, fit, config_of)
    with refused(UnusableError, "fit.params", "data.seed"):
        fit_budget("none", words, {"tokens": 1e6, "params": 9}, {"params": "data.seed"}, config_of)


def test_a_candidate_that_freezes_weights_has_steps_of_its_own(tmp_path: Path) -> None:
    """It had those of the first candidate, whose backward takes more."""
    frozen = ["optimizer.groups=[{param_regex: blocks, trainable: false}]"]
    tried = {"all": ROWS["none"], "frozen": [*ROWS["none"], *frozen], "fast": [*ROWS["none"], "optimizer.lr=0.1"]}
    rows = {"best": {"best_of": list(tried)}, "xl": ROWS["transformer_xl"], **tried}
    costs = apply_budget(load(tmp_path, ARENA, train=[], rows=rows, budget={"flops": 1e10}), config_of)
    assert costs["frozen"].steps > costs["all"].steps == costs["fast"].steps


def test_parameters_that_grow_with_the_square_of_a_width_meet_the_budget() -> None:
    """By a line through the widths 32 and 64, they were 38 % of the wanted ones away."""
    words = ROWS["none"]
    wanted = int(check_model(config_of([*words, "model.d_model=248"]))["num_parameters"]) + 1
    budget = {"tokens": 1e6, "params": wanted}
    added, costs = fit_budget("none", words, budget, {"params": "model.d_model"}, config_of)
    assert added[0] == "model.d_model=248" and costs.parameters == wanted - 1


NARROW = ["memory={kind: infinite, num_basis: 24, num_samples: 24}"]
MISSPELT = ["eval.mem_lne=4", "--without-memory"]
WRONG_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"rows": {"good": ["memory.kind=none"], "narrow": NARROW}}, "row narrow: memory.basis_widths"),
    "a seed too large": ({"seeds": [0, 2**70]}, "seeds[1]"),
    "an option": ({"columns": {"a": {"metric": "accuracy", "evaluate": ["--without-memoryy"]}}}, "column a: "),
    "of a trial": ({"tune": {"grid": {"optimizer.lrr": [0.1, 0.2]}}}, "row one lrr 0.1: "),
    "of a column": ({"columns": {"a": {"metric": "accuracy", "evaluate": MISSPELT}}}, "row one: column a: "),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
@pytest.mark.parametrize(
    "options", ["sweep", "sweep --check", "sweep --no-estimate", "sweep --slurm", "reproduce --no-estimate"]
)
def test_a_row_that_no_model_can_have_is_refused_before_any_run(
    name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of configs/sweeps/babilong.yaml had too few basis functions; it was seen when four others had trained."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "job.yaml", tmp_path / "books", tmp_path / "unused", {})
    changes, named = WRONG_ROWS[name]
    write(tmp_path, SWEEP, **{"grid": {}, "rows": {"one": ["memory.kind=none"]}, **changes})
    command, *more = options.split()
    assert main([command, "one.yaml", *more]) == EXIT_USAGE
    said(capsys.readouterr().err, f"one.yaml: {named}")
    assert not (tmp_path / "runs").exists()


def test_a_site_says_what_jobs_are_and_nothing_of_the_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its other keys were left out without a word, and one with a `=` in its path was taken for an override."""
    monkeypatch.chdir(tmp_path)
    asked = list[StudyRequest]()

    def run(request: StudyRequest) -> int:
        asked.append(request)
        return EXIT_DONE

    monkeypatch.setattr("dist_mem.studies.run_study.run", run)
    study, site = write(tmp_path, SWEEP), tmp_path / "a=b" / "site.yaml"
    site.parent.mkdir()
    site.write_text("launch: {nodes: 3}\n", encoding="utf-8")
    for words in (["a=b/site.yaml"], ["launch={nodes: 3}"]):
        assert main(["sweep", study, *words, "train.steps=7", "--slurm"]) == EXIT_DONE
        request = asked.pop()
        assert request.launch is not None and (request.launch.nodes, request.extra) == ("3", ["train.steps=7"])
    site.write_text("launch: {nodes: 3}\ntrain: {steps: 7}\n", encoding="utf-8")
    assert main(["sweep", study, "a=b/site.yaml", "--slurm"]) == EXIT_USAGE
    said(capsys.readouterr().err, "a=b/site.yaml", "train.steps: ", "launch", study)


RATES = {"optimizer.lr": [0.001, 0.002]}


def job_of(folder: Path, **tune: object) -> StudyCall:
    study = load(folder, ARENA, tune={"budget": {"tokens": 500}, **tune})
    return StudyCall(study, folder / "out", all_runs(study, folder / "out"), 1, [], StopSignal([]))


def kept(trials: StudyCall, best: dict[str, float]) -> None:
    """Keep a metric of every trial that is least at the best rate of its row; far above it, training diverged."""
    for run in trials.runs:
        row, _, rate = run.row.rpartition(" lr ")
        away = math.log(float(rate) / best[row])
        keep_result(run, "tuned", {"diverged": "why"} if away > 4 else {"value": 5 + abs(away), "step": 1})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(best=st.fixed_dictionaries(dict.fromkeys(ARENA["rows"], st.floats(-4.5, -1.0))), most=st.integers(2, 9))
def test_a_grid_grows_until_the_best_is_inside(best: dict[str, float], most: int) -> None:
    rates = {row: 10**power for row, power in best.items()}
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), grid=RATES, seeds=[5, 6], most=most)
        grids: dict[str, Grid] | None = None
        wider = grids_of(job)
        while wider != grids:
            grids = wider
            trials = trials_of(job, grids)
            kept(trials, rates)
            found, wider = choose_best(trials, grids)
        for row, grid in grids.items():
            values = sorted(grid["optimizer.lr"])
            place = values.index(dict(found[row].best)["optimizer.lr"])
            assert len(values) <= most
            assert 0 < place < len(values) - 1 or len(values) == most
            assert abs(math.log(values[place] / rates[row])) == min(abs(math.log(v / rates[row])) for v in values)


def test_trials_whose_perplexity_is_no_figure_are_ranked_in_bits_and_others_refused_for_their_reason(
    tmp_path: Path,
) -> None:
    """Of text without blanks no word has a perplexity, and `lower values` were advised."""
    job = job_of(tmp_path, grid=RATES, most=2)
    trials = trials_of(job, grids_of(job))
    absent = {"absent": "validation/word_perplexity", "step": 1}
    for run in trials.runs:
        keep_result(run, "tuned", {**absent, "bits_per_byte": 2.0 if run.row.endswith("0.002") else 3.0})
    found, _ = choose_best(trials, grids_of(job))
    assert str(found["none"]) == "lr 0.002, chosen on validation (lr 0.001: 3 bits per byte, lr 0.002: 2 bits per byte)"
    for run in trials.runs:
        keep_result(run, "tuned", absent)
    with refused(UnusableError, "word_perplexity", "columns"):
        choose_best(trials, grids_of(job))
    kept(trials, {"none": 0.001, "transformer_xl": 1e-9})
    with refused(UnusableError, "transformer_xl", "tune.grid", "lower"):
        choose_best(trials, grids_of(job))


def test_a_grid_of_whole_numbers_grows_by_whole_numbers() -> None:
    """memory.mem_len=256.0 is refused, which was seen when all trials had been trained."""
    grown = widen({"memory.mem_len": [64, 1000, 1024]}, {"memory.mem_len": 64}, most=8)
    assert grown == {"memory.mem_len": [64, 1000, 1024]}
    (values,) = widen({"memory.mem_len": [512, 1024]}, {"memory.mem_len": 1024}, most=8).values()
    assert values == [512, 1024, 2048] and {type(value) for value in values} == {int}
    (values,) = widen({"memory.mem_len": [3, 6]}, {"memory.mem_len": 3}, most=8).values()
    assert values == [3, 6], "1.5 is none"
    assert widen({"optimizer.lr": [1, 2.0]}, {"optimizer.lr": 1}, most=8) == {"optimizer.lr": [0.5, 1, 2.0]}


def test_trials_may_try_lists_and_nothing(tmp_path: Path) -> None:
    grid = {"optimizer.betas": [[0.9, 0.95], [0.9, 0.999]], "train.max_grad_norm": [None, 0.25]}
    job = job_of(tmp_path, grid=grid, most=2)
    trials = trials_of(job, grids_of(job))
    assert trials.study.trained_rows["none betas 0.9 0.95 max_grad_norm None"][-2:] == [
        "optimizer.betas=[0.9, 0.95]", "train.max_grad_norm=null",
    ]  # fmt: skip
    for number, run in enumerate(trials.runs):
        keep_result(run, "tuned", {"value": 1.0 + number % 4, "step": 1})
    found, _ = choose_best(trials, grids_of(job))
    assert found["none"].words == ["optimizer.betas=[0.9, 0.95]", "train.max_grad_norm=null"]
    assert "betas 0.9 0.999 max_grad_norm 0.25: 4" in str(found["none"])
    tuned = load_config([*SIZES, *found["none"].words])
    assert (tuned.optimizer.betas, tuned.train.max_grad_norm) == ([0.9, 0.95], None)


def test_trials_have_their_budget_and_a_rows_own_keys(tmp_path: Path) -> None:
    job = job_of(tmp_path, grid=RATES, rows={"transformer_xl": {"memory.mem_len": [8, 16]}})
    trials = trials_of(job, grids_of(job))
    assert trials.study.budget == {"tokens": 500}
    assert {run.row for run in trials.runs} == {
        *(f"none lr {rate}" for rate in RATES["optimizer.lr"]),
        *(f"transformer_xl lr {rate} mem_len {rows}" for rate in RATES["optimizer.lr"] for rows in (8, 16)),
    }
    assert {run.seed for run in trials.runs} == {3}
    assert trials.study.candidates["none lr 0.001"] == "none"
    assert trials.study.columns["tuned"].split == "validation"


def test_rows_that_an_earlier_call_has_finished_are_tuned_too(tmp_path: Path) -> None:
    """Or else they would be checked with the settings of the study, which are not theirs."""
    job = job_of(tmp_path, grid=RATES)
    rows = [run.row for run in job.runs]
    keep_result(job.runs[-1], next(iter(job.study.columns)), {"value": 1.0, "step": 1})
    assert rows[0] != rows[-1]
    assert set(grids_of(replace(job, runs=job.runs[:1]))) == {rows[0], rows[-1]}


@pytest.mark.parametrize(
    ("tune", "key"),
    [
        ({"grid": {"optimizer.lr": []}}, "tune.grid.optimizer.lr"),
        ({"grid": {"optimizer.lr": [0.1, 0.1]}}, "tune.grid.optimizer.lr"),
        ({"grid": {"optimizer.betas": [[0.9, 0.95], [0.9, 0.95]]}}, "tune.grid.optimizer.betas"),
        ({"rows": {"xl": RATES}}, "'xl'"),
        ({"rows": {"transformer_xl": {"memory.mem_len": [8, 16]}}}, "fit.state_bytes"),
        ({"grid": {**RATES, "model.d_inner": [8, 16]}}, "fit.params"),  # of which one key stands for all rows
        ({"rows": {"none": RATES}}, "'best'"),
        ({"grid": RATES, "budget": {"flops": 1e12}}, "'flops'"),
        ({"grid": RATES, "budget": {"tokens": math.inf}}, "tune.budget.tokens is inf"),
        ({"grid": RATES, "seeds": [5, 1]}, "tune.seeds has 1"),
        ({"grid": RATES, "seeds": [5, 5]}, "tune.seeds is [5, 5]"),  # each trial would run twice, in one folder
        ({"grid": RATES, "seeds": [-5]}, "tune.seeds is [-5]"),
        ({"grid": {"train.seed": [5, 6]}}, "train.seed"),  # all trials were one run
        ({"grid": {"data.path": ["x", "y"]}}, "data.path"),  # whose scores do not compare
    ],
)
def test_a_grid_of_nothing_is_refused(tmp_path: Path, tune: dict[str, object], key: str) -> None:
    changes: dict[str, Any] = {}
    if key.startswith("fit."):
        changes = {
            "budget": {"tokens": 5000, "state_bytes": 999},
            "fit": {"state_bytes": {"transformer_xl": "memory.mem_len"}},
        }
    if key == "fit.params":
        changes = FITTED
        load(tmp_path, ARENA, tune={"grid": RATES}, **changes)
    if key == "'best'":
        changes = {"rows": {**ROWS, "best": {"best_of": ["none", "transformer_xl"]}, "other": ["memory.kind=none"]}}
    load(tmp_path, ARENA, **changes)
    with refused(UnusableError, "one.yaml", key):
        load(tmp_path, ARENA, tune=tune, **changes)


TABLES = [
    ("reproduce", name, scale)
    for name in study_names(ROOT / FOLDER)
    for scale in yaml.safe_load(study_path(name, ROOT / FOLDER).read_text(encoding="utf-8"))["scales"]
]
FILES = [
    (command, path.relative_to(ROOT).as_posix(), "")
    for command, folder in (("sweep", "sweeps"), ("arena", "arena"))
    for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))
]


@pytest.mark.parametrize(("command", "name", "scale"), [*TABLES, *FILES])
def test_check_lists_every_row_without_any_data(
    command: str,
    name: str,
    scale: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shipped in ("configs", "examples"):
        (tmp_path / shipped).symlink_to(ROOT / shipped)
    monkeypatch.chdir(tmp_path)
    assert main([command, name, "--check", *(["--scale", scale] if scale else [])]) == EXIT_DONE
    captured = capsys.readouterr()
    assert captured.err == ""
    study = load_study(name, scale)
    for key in study.trained_rows:
        assert f"\n{key}: {study.rows[key].name}" in captured.out
    for point in study.points.values():
        assert f"{point.data}: not built yet" in " ".join(captured.out.split())
    if scale == "paper":
        assert "is assumed" not in captured.out  # the size of the vocabulary is known
        figures = [value for row in study.rows.values() for value in row.paper.values()]
        assert not [value for value in figures if f" {value:g}" not in captured.out]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "examples"]  # nothing is written


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of one's own in a folder of its own, with its configuration beside it."""
    data = build_books(tmp_path)
    (tmp_path / "my").mkdir()
    write_config(tmp_path / "my" / "job.yaml", data, tmp_path / "unused", {"train": {"steps": 2}})
    table = two_memories(str(data), "tiny", "paper", train=["job.yaml", "tracking.mlflow=false"])
    table["rows"]["none"]["sizes"] = {"parameters": 2e6}
    write_mine(tmp_path, table)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_mine(folder: Path, table: dict[str, Any]) -> None:
    (folder / "my" / "mine.yaml").write_text(yaml.safe_dump(table, sort_keys=False))


def read_mine(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((folder / "my" / "mine.yaml").read_text())
    return table


def test_check_tells_data_that_are_built_and_the_papers_figures(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "my/mine.yaml", "--scale", "paper", "--check", "train.steps=7"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "every row: my/job.yaml" in text
    assert " ".join(text.split()).count("steps=7 ") == 1  # what all rows share is printed once
    assert re.search(r"\nnone: None\n  memory +kind=none\n  parameters +[\d,]+ \(the paper: 2 M\)\n", text)
    assert re.search(r" data \S+, train: \d+ documents.*; 7 steps", " ".join(text.split()))  # lines are wrapped
    assert re.search(r"  the paper +test 1\.5\n", text)
    assert not (own / "runs").exists()


def test_check_shows_a_row_before_it_checks_the_next(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of the papers take seconds: a long check shows that it goes on, in a pipe too."""
    pipe, seen = own / "pipe", list[str]()
    monkeypatch.setattr("dist_mem.studies.row_check.check_model", lambda _: seen.append(pipe.read_text()))
    with pipe.open("w", buffering=1 << 20) as stream, redirect_stdout(stream):
        assert check(load_study("my/mine.yaml", "paper"), rows=[], ranks=1, extra=[]) == EXIT_DONE
    assert ["\nnone: " in text for text in seen] == [False, True]


def test_check_names_every_row_that_cannot_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_mine(own)
    table["scales"]["paper"]["rows"] = {"none": ["memory.kind=nonesuch"], "xl": ["train.global_batch_size=64"]}
    write_mine(own, table)
    assert main(["reproduce", "my/mine.yaml", "--scale", "paper", "--check"]) == EXIT_USAGE
    errors = capsys.readouterr().err
    assert "row none: " in errors
    assert "nonesuch" in errors
    assert re.search(r"row xl: .*64", errors)  # the data have fewer documents than lanes


def test_a_row_may_have_data_of_its_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_mine(own)
    table["scales"]["tiny"]["rows"]["none"].append("data.path=elsewhere")
    table["scales"]["tiny"]["points"][""]["made_by"] = "dist-mem data build text"
    write_mine(own, table)
    assert main(["reproduce", "my/mine.yaml", "--check"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "elsewhere: not built yet" in text
    assert "data built by dist-mem data build text" in text
    assert main(["reproduce", "my/mine.yaml", "--rows", "none"]) == EXIT_USAGE
    assert "elsewhere is missing" in capsys.readouterr().err

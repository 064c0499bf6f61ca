"""The definition of a study: its rows, its grid, its scales, its budget, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import Config, load_config
from dist_mem.errors import EXIT_USAGE, UnusableError
from dist_mem.estimate.counting import flops_per_token
from dist_mem.estimate.dry_run import check_model
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.memory import memory_options
from dist_mem.studies.budget import apply_budget, fitted
from dist_mem.studies.runs import all_runs, is_better_higher, rows_behind, train_words
from dist_mem.studies.study import RECALL, load_study
from tests.studies.small import ARENA, ROWS, STUDY, SWEEP, at_tiny, load, write
from tests.support.jobs import write_config
from tests.support.messages import refused

SIZES = [
    "data.path=absent",
    "model.num_layers=2",
    "model.d_model=16",
    "model.num_heads=2",
    "train.seg_len=8",
    "train.steps=1",
]


def test_every_combination_is_a_row_with_a_name_of_its_own(tmp_path: Path) -> None:
    found = load(tmp_path, SWEEP, rows={"odd": ["model.d_model=32"]}).trained
    assert list(found) == [
        "none-lr0.001-dropout0.0", "none-lr0.002-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0",
        "odd",
    ]  # fmt: skip
    assert found["long-lr0.002-dropout0.0"] == ["memory/long.yaml", "optimizer.lr=0.002", "model.dropout=0.0"]


def test_combinations_with_all_values_of_a_condition_are_left_out(tmp_path: Path) -> None:
    found = load(tmp_path, SWEEP, skip=[{"memory": "none", "optimizer.lr": 0.002}]).trained
    assert list(found) == ["none-lr0.001-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0"]


def test_overrides_that_belong_together_are_one_value(tmp_path: Path) -> None:
    size = ["model.d_model=64", "model.num_heads=4"]
    assert load(tmp_path, SWEEP, grid={"size": [size], "train.compile": [True, None]}).trained == {
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
    assert (first.scale, list(first.trained)) == ("tiny", ["xl", "small", "large"])
    assert list(first.columns) == ["500", "1000"]
    assert (small.scale, small.trained, list(small.columns)) == ("small", {"xl": ["memory.mem_len=8"]}, ["all"])
    with refused(UnusableError, "one.yaml"):
        load_study(path, "big")
    with refused(UnusableError, "one.yaml"):
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
    assert list(load_study("configs/sweeps/memories.yaml").trained) == ["none", "transformer_xl", "compressive"]
    assert load_study("recall").title.startswith("What is read")
    with refused(UnusableError):
        load_study("three")


def test_more_runs_are_taken_if_the_command_allows_them(tmp_path: Path) -> None:
    assert len(load_study(write(tmp_path, SWEEP, seeds=[*range(300)]), max_runs=1200).seeds) == 300


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"skip": [{"memroy": "none"}]}, "skip[0] has 'memroy', which is not a key of the grid; did you mean memory?"),
        ({"skip": [{"optimizer.lr": 0.1}]}, "skip[0]: optimizer.lr never has the value 0.1; it has [0.001, 0.002]"),
        ({"grid": {"optimizer.lr": []}}, "grid.optimizer.lr has no values"),
        ({"grid": {}}, "rows is empty, and there is no grid: nothing would be trained"),
        ({"grid": {"memory": ["a/x.yaml", "b/x.yaml"]}}, "two rows are called 'x'"),
        ({"grid": {"memory": ["a/x.yaml"]}, "rows": {"x": []}}, "two rows are called 'x'"),
        ({"sedes": [1]}, "Key 'sedes' not in 'Study'"),
        ({"rows": {"a/b": []}}, "row 'a/b' names files"),
        ({"rows": {"a": {"train": [], "best_of": ["b"]}, "b": []}}, "'a', which is the best of other rows and not run"),
        ({"data": None}, "data is not set"),
        ({"seeds": [0, 0]}, "seeds is [0, 0], but must be different numbers of at least 0"),
        ({"seeds": [-1]}, "seeds is [-1], but must be different numbers of at least 0"),
        ({"seeds": []}, "seeds is [], but must be different numbers of at least 0"),
        ({"columns": {"a": {"metric": "acuracy"}}}, "metric 'acuracy', which evaluate does not measure: did you mean"),
        ({"columns": {"a": {"metric": "accuracy", "command": "dialogue"}}}, "which dialogue does not measure; it me"),
        ({"columns": {"a": {"metric": "accuracy", "command": "train"}}}, "command 'train', not one of evaluate, dialo"),
        (
            {"columns": {"a": {"metric": "accuracy"}}, "x_axis": "n"},
            "column 'a' is not a number, which x_axis req",
        ),
        ({"figures": {"lamemo.fig7": ["lamemo"]}}, "figures.lamemo.fig7 has 'lamemo', which is not a row"),
        (
            {"grid": {f"model.k{number}": [*range(20)] for number in range(7)}},
            "are 1,280,000,000 runs, more than 1,000",
        ),
        ({"seeds": [*range(300)]}, "4 combinations and rows with 300 seeds are 1,200 runs, more than 1,000: give few"),
    ],
)
def test_what_a_sweep_cannot_mean_is_refused(tmp_path: Path, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UnusableError, match=rf"one\.yaml.*{re.escape(reported)}"):
        load(tmp_path, SWEEP, **changes)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"rows": {"none": []}}, "rows has 1; a budget needs at least two, to compare"),
        ({"budget": {}, "fit": {"params": "model.d_inner"}}, "budget must have exactly one of tokens and flops"),
        ({"budget": {"tokens": 1, "flops": 1}}, "budget must have exactly one of tokens and flops"),
        (
            {"budget": {"tokens": 5, "hours": 1}},
            "budget has 'hours', but must be of tokens, flops, params, state_bytes",
        ),
        ({"budget": {"tokens": 5, "params": 9}}, "params must be both in budget, the size, and in fit"),
        ({"budget": {"tokens": -5}}, "budget.tokens is -5, but must be above 0"),
        ({"points": {name: {"data": name} for name in "ab"}, "data": None}, "points has 2; a budget is that of one"),
        (
            {"columns": {"far": {"metric": "accuracy", "evaluate": ["data.path=data/far"]}}},
            "columns.far.evaluate has 'data.path=data/far'",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(tmp_path: Path, changes: dict[str, Any], reported: str) -> None:
    columns = {"a": {"metric": "accuracy", "point": "a"}} if "points" in changes else {}
    with pytest.raises(UnusableError, match=rf"one\.yaml.*{re.escape(reported)}"):
        load(tmp_path, {**ARENA, "columns": columns}, **changes)


def test_an_arena_has_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", write(tmp_path, SWEEP)]) == EXIT_USAGE
    assert "one.yaml has no budget: give one, or compare its rows by `dist-mem sweep`" in capsys.readouterr().err


def test_what_a_table_cannot_mean_is_refused(tmp_path: Path) -> None:
    rows, tiny = STUDY["rows"], STUDY["scales"]["tiny"]
    for changes, reported in (
        ({"scales": at_tiny(rows={**tiny["rows"], "best": []})}, r"'best', which is the best of other rows"),
        ({"scales": at_tiny(rows={"xll": []})}, r"scales\.tiny\.rows has 'xll', which is not a row of the table"),
        ({"scales": at_tiny(rows={})}, r"scales\.tiny\.rows is empty"),
        ({"rows": {**rows, "best": {"best_of": ["smal"]}}}, r"best\.best_of has 'smal'"),
        ({"rows": {**rows, "top": {"best_of": ["xl", "best"]}}}, r"top\.best_of has 'best', which has a best_of"),
        ({"rows": {**rows, "xl": {"sizes": {"bytes": 1.0}}}}, r"xl\.sizes has 'bytes', not one of parameters"),
        ({"scales": at_tiny(points={"other": {"data": "x"}})}, r"scales\.tiny\.points lacks 'a', the point of column"),
        ({"scales": at_tiny(points={n: {"data": "d", "without": ["xll"]} for n in "ab"})}, r"a\.without has 'xll'"),
        ({"scales": at_tiny(points={n: {"data": "d", "without": ["xl"]} for n in "ab"})}, r"'xl' is run at no point"),
    ):  # fmt: skip
        with pytest.raises(UnusableError, match=reported):
            load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("figure", "band"),
    [("accuracy", [1, 2]), ("accuracy", [1, 2, 3])]
    + [(figure, band) for figure in RECALL for band in ([], [1, 2, 3], [256, 64], [64, 64])],
)
def test_a_band_is_refused_if_no_token_can_be_in_it(tmp_path: Path, figure: str, band: list[int]) -> None:
    columns = {"500": {"metric": figure, "point": "a", "band": band}}
    with pytest.raises(UnusableError, match=re.escape(f"one.yaml: scales.tiny.column '500' has band {band} and")):
        load(tmp_path, scales=at_tiny(columns=columns))


@pytest.mark.parametrize("name", ["> 64", "(0, 32]", "a/b", "", "../x"])
def test_names_that_no_file_or_figure_can_have_are_refused(tmp_path: Path, name: str) -> None:
    tiny = STUDY["scales"]["tiny"]
    wrong: list[dict[str, Any]] = [{"scales": at_tiny(columns={name: {"metric": "accuracy", "point": "a"}})}]
    wrong.append({"rows": {**STUDY["rows"], name: {"name": "Odd"}}})
    if name:  # the only point needs none
        wrong.append({"scales": at_tiny(points={**tiny["points"], name: {"data": "d"}})})
    for changes in wrong:
        with refused(UnusableError, "one.yaml"):
            load(tmp_path, **changes)


def test_the_best_has_most_accuracy_and_least_perplexity() -> None:
    higher = ["accuracy", "recall_accuracy", "recall_accuracy_memory"]
    assert [name for name in [*higher, "recall_perplexity", "word_perplexity"] if is_better_higher(name)] == higher


def config_of(words: Sequence[str]) -> Config:
    return load_config([*SIZES, *words], memory_options=memory_options)


def test_a_budget_is_met_up_to_one_update_and_one_unit_of_size(tmp_path: Path) -> None:
    fit = {"params": "model.d_inner", "state_bytes": {"transformer_xl": "memory.mem_len"}}
    wanted = {"flops": 1e10, "params": 560_000, "state_bytes": 4_096}
    study = load(tmp_path, ARENA, train=[], budget=wanted, fit=fit)
    costs = apply_budget(study, config_of)
    assert list(costs) == list(study.trained)
    for row, words in study.trained.items():
        config = config_of(words)
        found, train = check_model(config), config.train
        of_token = flops_per_token(config, vocab_size_of(config.data, config.model)).training
        update = train.global_batch_size * train.seg_len * train.segments_per_update * of_token
        assert 0 <= wanted["flops"] - train.steps * update < update
        assert costs[row].flops == train.steps * update
        assert abs(found["num_parameters"] - wanted["params"]) <= 8 * 2 * (2 * 16 + 1) / 2  # 8 units of d_inner
        of_xl = row.startswith("transformer_xl")
        assert abs(found["state_bytes_per_lane"] - (4_096 if of_xl else 0)) <= 8 * 16 * 4 * 2 / 2 + 2 * 8  # 8 rows
    words = ROWS["none"]
    with refused(UnusableError):
        fitted("none", words, {"tokens": 3}, {}, config_of)
    with refused(UnusableError, "budget.params", "model.d_inner"):
        fitted("none", words, {"tokens": 1e6, "params": 9}, fit, config_of)
    with refused(UnusableError, "fit.params", "data.seed"):
        fitted("none", words, {"tokens": 1e6, "params": 9}, {"params": "data.seed"}, config_of)


WRONG_ROWS = {
    "narrow": (
        {"rows": {"good": ["memory.kind=none"], "narrow": ["memory={kind: infinite, num_basis: 24, num_samples: 24}"]}},
        "row narrow: memory.basis_widths are [0.005, 0.01], too narrow",
    ),
    "a seed too large": (
        {"seeds": [0, 2**70]},
        "seeds[1]: is 1180591620717411303424, but numbers have at most 64 bits",
    ),
    "an override of a column": (
        {"columns": {"a": {"metric": "accuracy", "evaluate": ["eval.mem_lne=4", "--without-memory"]}}},
        "row one: column a: command line: eval.mem_lne: unknown key; did you mean eval.mem_len?",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
@pytest.mark.parametrize("options", ["sweep", "sweep --no-estimate", "sweep --slurm", "reproduce"])
def test_a_row_that_no_model_can_have_is_refused_before_any_run(
    name: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of configs/sweeps/babilong.yaml had too few basis functions; it was seen when four others had trained."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "job.yaml", tmp_path / "books", tmp_path / "unused", {})
    changes, reported = WRONG_ROWS[name]
    write(tmp_path, SWEEP, **{"grid": {}, "rows": {"one": ["memory.kind=none"]}, **changes})
    command, *more = options.split()
    assert main([command, "one.yaml", *more]) == EXIT_USAGE
    assert f"one.yaml: {reported}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["reproduce", "sweep", "sweep --slurm", "arena", "arena --slurm"])
def test_a_file_that_is_not_there_leaves_nothing_behind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    assert main([name, "nope.yaml", *options]) == EXIT_USAGE
    assert "there is no file nope.yaml" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""The definition of a study: its rows, its grid, its scales, its budget, and what is refused."""

from __future__ import annotations

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
from tests.support.messages import refused, said

SIZES = ["data.path=absent", "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "train.seg_len=8"]
SIZES += ["train.steps=1"]


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


TINY = STUDY["scales"]["tiny"]
MEANINGLESS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a sweep": (
        SWEEP,
        [
            {"skip": [{"memroy": "none"}]},
            {"skip": [{"optimizer.lr": 0.1}]},
            {"grid": {"optimizer.lr": []}},
            {"grid": {}},
            {"grid": {"memory": ["a/x.yaml", "b/x.yaml"]}},
            {"grid": {"memory": ["a/x.yaml"]}, "rows": {"x": []}},
            {"sedes": [1]},
            {"rows": {"a/b": []}},
            {"rows": {"a": {"train": [], "best_of": ["b"]}, "b": []}},
            {"data": None},
            *({"seeds": seeds} for seeds in ([0, 0], [-1], [])),
            {"columns": {"a": {"metric": "acuracy"}}},
            *({"columns": {"a": {"metric": "accuracy", "command": name}}} for name in ("dialogue", "train")),
            {"columns": {"a": {"metric": "accuracy"}}, "x_axis": "n"},
            {"figures": {"lamemo.fig7": ["lamemo"]}},
            {"grid": {f"model.k{number}": [*range(20)] for number in range(7)}},
            {"seeds": [*range(300)]},
        ],
    ),
    "a budget that cannot be kept": (
        {**ARENA, "columns": {}},
        [
            {"rows": {"none": []}},
            {"budget": {}, "fit": {"params": "model.d_inner"}},
            {"budget": {"tokens": 1, "flops": 1}},
            {"budget": {"tokens": 5, "hours": 1}},
            {"budget": {"tokens": 5, "params": 9}},
            {"budget": {"tokens": -5}},
            {
                "points": {name: {"data": name} for name in "ab"},
                "data": None,
                "columns": {"a": {"metric": "accuracy", "point": "a"}},
            },
            {"columns": {"far": {"metric": "accuracy", "evaluate": ["data.path=data/far"]}}},
        ],
    ),
    "a table": (
        STUDY,
        [
            {"scales": at_tiny(rows={**TINY["rows"], "best": []})},
            {"scales": at_tiny(rows={"xll": []})},
            {"scales": at_tiny(rows={})},
            {"rows": {**STUDY["rows"], "best": {"best_of": ["smal"]}}},
            {"rows": {**STUDY["rows"], "top": {"best_of": ["xl", "best"]}}},
            {"rows": {**STUDY["rows"], "xl": {"sizes": {"bytes": 1.0}}}},
            {"scales": at_tiny(points={"other": {"data": "x"}})},
            *({"scales": at_tiny(points={n: {"data": "d", "without": [row]} for n in "ab"})} for row in ("xll", "xl")),
        ],
    ),
    "a band in which no token can be": (
        STUDY,
        [
            {"scales": at_tiny(columns={"500": {"metric": figure, "point": "a", "band": band}})}
            for figure in ("accuracy", *RECALL)
            for band in ([[1, 2], [1, 2, 3]] if figure == "accuracy" else [[], [1, 2, 3], [256, 64], [64, 64]])
        ],
    ),
}


@pytest.mark.parametrize("kind", MEANINGLESS)
def test_what_a_file_cannot_mean_is_refused(tmp_path: Path, kind: str) -> None:
    content, wrong = MEANINGLESS[kind]
    for changes in wrong:
        with refused(UnusableError, "one.yaml"):
            load(tmp_path, content, **changes)


def test_an_arena_has_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", write(tmp_path, SWEEP)]) == EXIT_USAGE
    said(f"exit code 2: {capsys.readouterr().err}", "one.yaml")


@pytest.mark.parametrize("name", ["> 64", "(0, 32]", "a/b", "", "../x"])
def test_names_that_no_file_or_figure_can_have_are_refused(tmp_path: Path, name: str) -> None:
    wrong: list[dict[str, Any]] = [{"scales": at_tiny(columns={name: {"metric": "accuracy", "point": "a"}})}]
    wrong.append({"rows": {**STUDY["rows"], name: {"name": "Odd"}}})
    if name:  # the only point needs none
        wrong.append({"scales": at_tiny(points={**TINY["points"], name: {"data": "d"}})})
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


NARROW = ["memory={kind: infinite, num_basis: 24, num_samples: 24}"]
MISSPELT = ["eval.mem_lne=4", "--without-memory"]
WRONG_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"rows": {"good": ["memory.kind=none"], "narrow": NARROW}}, "row narrow: memory.basis_widths"),
    "a seed too large": ({"seeds": [0, 2**70]}, "seeds[1]"),
    "of a column": ({"columns": {"a": {"metric": "accuracy", "evaluate": MISSPELT}}}, "row one: column a: "),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
@pytest.mark.parametrize("options", ["sweep", "sweep --no-estimate", "sweep --slurm", "reproduce"])
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
    said(f"exit code 2: {capsys.readouterr().err}", f"one.yaml: {named}")
    assert not (tmp_path / "runs").exists()

"""An arena: its budget, its table with intervals, that it can be stopped, and that a cell can be repeated by hand."""

from __future__ import annotations

import csv
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.config import Config, load_config
from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE, UnusableError
from dist_mem.estimate.dry_run import check_model
from dist_mem.evaluation.report import read_report
from dist_mem.memory import memory_options
from dist_mem.studies.arena import SCALE, load_arena, memory_of_row
from dist_mem.studies.arena_page import are_equal, checksum, pareto_front, shown
from dist_mem.studies.budget import fitted
from dist_mem.studies.results import Cell
from dist_mem.tracking.mlflow.run import connect
from tests.support.jobs import build_books, logged_steps, write_config
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT

MEMORIES = {
    "none": ["memory.kind=none"],
    "transformer_xl": ["memory.kind=transformer_xl"],
    "outside": [f"memory.kind={ROOT}/examples/averages.py:Averages"],
}
SIZES = [
    "data.path=absent",
    "model.num_layers=2",
    "model.d_model=16",
    "model.num_heads=2",
    "train.seg_len=8",
    "train.steps=1",
]


def write(folder: Path, **changes: Any) -> Path:
    arena = {"train": ["job.yaml"], "memories": MEMORIES, "budget": {"tokens": 5000}, "data": "books", **changes}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(arena, sort_keys=False), encoding="utf-8")
    return path


def load(words: Sequence[str]) -> Config:
    return load_config([*SIZES, *words], memory_options=memory_options)


def test_every_memory_has_a_row_and_with_rates_the_best_of_them(tmp_path: Path) -> None:
    _, table = load_arena(write(tmp_path))
    assert list(table.scales[SCALE].rows) == list(MEMORIES)
    arena, table = load_arena(write(tmp_path, learning_rates=[0.001, 0.01]))
    rows = table.scales[SCALE].rows
    assert table.rows["none"].best_of == ["none lr 0.001", "none lr 0.01"]
    assert rows["none lr 0.01"] == ["memory.kind=none", "optimizer.lr=0.01"]
    assert {memory_of_row(arena, row) for row in rows} == set(MEMORIES)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"memories": {"none": []}}, "memories has 1; give at least two"),
        ({"budget": {}}, "budget must have exactly one of tokens and flops"),
        ({"budget": {"tokens": 1, "flops": 1}}, "budget must have exactly one of tokens and flops"),
        (
            {"budget": {"tokens": 5, "hours": 1}},
            "budget has 'hours', but must be of tokens, flops, params, state_bytes",
        ),
        ({"budget": {"tokens": 5, "params": 9}}, "params must be both in budget, the size, and in fit"),
        ({"budget": {"tokens": -5}}, "budget.tokens is -5, but must be above 0"),
        (
            {"columns": {"far": {"figure": "accuracy", "evaluate": ["data.path=data/far"]}}},
            "columns.far.evaluate has 'data.path=data/far'",
        ),
        ({"memroies": {}}, "Key 'memroies' not in 'Arena'"),
    ],
)
def test_what_an_arena_cannot_mean_is_refused(tmp_path: Path, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UnusableError) as caught:
        load_arena(write(tmp_path, **changes))
    assert reported in str(caught.value)
    assert "small.yaml" in str(caught.value)


def test_a_budget_is_met_up_to_one_update_and_one_unit_of_size() -> None:
    fit = {"params": "model.d_inner", "state_bytes": {"transformer_xl": "memory.mem_len"}}
    wanted = {"flops": 1e10, "params": 560_000, "state_bytes": 4_096}
    for name in ("none", "transformer_xl"):
        words, costs = fitted(name, MEMORIES[name], wanted, fit, load, check_model)
        config = load([*MEMORIES[name], *words])
        found, train = check_model(config), config.train
        update = train.global_batch_size * train.seg_len * train.segments_per_update * found["training_flops_per_token"]
        assert 0 <= wanted["flops"] - train.steps * update < update
        assert costs.flops == train.steps * update
        assert abs(found["num_parameters"] - wanted["params"]) <= 8 * 2 * (2 * 16 + 1) / 2  # 8 units of d_inner
        assert abs(found["state_bytes_per_lane"] - {"none": 0}.get(name, 4_096)) <= 8 * 16 * 4 * 2 / 2 + 2 * 8  # 8 rows
    with pytest.raises(UnusableError, match="none: the budget is less than one update"):
        fitted("none", MEMORIES["none"], {"tokens": 3}, {}, load, check_model)
    with pytest.raises(UnusableError, match=r"none: budget\.params is 9, but the smallest model\.d_inner, 8, has 5"):
        fitted("none", MEMORIES["none"], {"tokens": 1e6, "params": 9}, fit, load, check_model)
    with pytest.raises(UnusableError, match=r"fit\.params is data.seed, which does not change it"):
        fitted("none", MEMORIES["none"], {"tokens": 1e6, "params": 9}, {"params": "data.seed"}, load, check_model)


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


def test_a_cell_says_how_many_of_its_seeds_diverged() -> None:
    assert shown(Cell([1.0, 2.0], diverged=1, absent=0, missing=2)) == "1.5 ± 0.71, 1 diverged, 2 to run"
    assert shown(Cell([1.0], diverged=0, absent=0, missing=0)) == "1"
    assert shown(Cell([], diverged=3, absent=0, missing=0)) == "3 diverged"


def dist_mem(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dist_mem", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def done(folder: Path, *arguments: str) -> str:
    process = dist_mem(folder, *arguments)
    text = process.communicate(timeout=limit(600))[0]
    assert process.returncode == EXIT_DONE, text
    return text


@pytest.mark.slow
def test_the_page_of_an_arena_reaches_its_run_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was closed before the page was written. Nothing is trained: each cell says that it is to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dist_mem.studies.command.for_each_run", lambda *_, **__: [])
    data, store = build_books(tmp_path), f"sqlite:///{tmp_path / 'store.db'}"
    tracking = {"tracking": {"mlflow": True, "uri": store}}
    config = load_config([str(write_config(tmp_path / "job.yaml", data, tmp_path / "unused", tracking))])
    columns = {"dev": {"figure": "token_perplexity", "split": "validation"}}
    budget, memories = (
        {"tokens": 3 * config.train.global_batch_size * 16},
        {"none": [], "causal": ["memory.kind=causal"]},
    )
    write(tmp_path, memories=memories, columns=columns, data=str(data), seeds=[0], budget=budget)
    assert main(["arena", "small.yaml", "--out", "out", "--no-estimate"]) == EXIT_DONE
    client, run_id = connect(store), (tmp_path / "out" / "mlflow_run_id").read_text(encoding="utf-8").strip()
    assert client.get_run(run_id).info.status == "FINISHED"
    sent = {file.path for file in client.list_artifacts(run_id)}
    assert {"table.md", "table.csv", "table.png", "arena.md", "cells.csv", "pareto.png"} <= sent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_arena_that_was_stopped_goes_on_and_its_cells_can_be_repeated(tmp_path: Path) -> None:
    """A memory from outside the package takes part like any other."""
    data = build_books(tmp_path)
    write_config(
        tmp_path / "job.yaml", data, tmp_path / "unused", {"checkpoint": {"every": 10}, "train": {"threads": 1}}
    )
    columns = {"dev": {"figure": "token_perplexity", "split": "validation"}}
    memories = {name: MEMORIES[name] for name in ("none", "outside")}
    budget = {"tokens": 60 * load_config([str(tmp_path / "job.yaml")]).train.global_batch_size * 16}
    write(tmp_path, memories=memories, columns=columns, data=str(data), seeds=[0, 1], budget=budget)

    assert "outside" in done(tmp_path, "arena", "small.yaml", "--plan", "--out", "out")
    command = ("arena", "small.yaml", "eval.allow_code=true", "--out", "out", "--jobs", "2", "--no-estimate")
    process = dist_mem(tmp_path, *command)
    run = tmp_path / "out" / "runs" / "none-seed0"
    wait_until(lambda: process.poll() is not None or len(logged_steps(run)) > 5, "some steps", seconds=400)
    process.send_signal(signal.SIGTERM)
    stopped = process.communicate(timeout=limit(120))[0]
    assert process.returncode == EXIT_REQUEUE, stopped
    text = done(tmp_path, *command)
    assert "none / memory, 95 %" in text
    assert (tmp_path / "out" / "pareto.png").is_file()
    with (tmp_path / "out" / "cells.csv").open(encoding="utf-8") as lines:
        cells = list(csv.DictReader(lines))
    assert [(cell["memory"], cell["seed"]) for cell in cells] == [(name, seed) for name in memories for seed in "01"]
    assert len({cell["sha256"] for cell in cells}) == 4
    for cell in (cells[0], cells[-1]):
        by_hand = tmp_path / "by_hand" / cell["row"]
        directory = f"out/runs/{cell['row']}-seed{cell['seed']}"
        for command in ("training", "evaluation"):
            words = [word.replace(directory, str(by_hand)) for word in shlex.split(cell[command])]
            done(tmp_path, *words[1:])
        (report,) = (by_hand / "evaluations").glob("validation-*.json")
        assert checksum(read_report(report)) == cell["sha256"]

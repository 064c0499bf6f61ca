"""A sweep: its rows, its places on a machine, what it estimates, and that a run that dies is started again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.errors import UnusableError
from dist_mem.estimate.dry_run import check_model
from dist_mem.memory import memory_options
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.estimate import Estimate, finish_seconds, report
from dist_mem.studies.grid import SCALE, load_sweep
from dist_mem.studies.job import CommandError, Job, Place, places
from dist_mem.studies.pool import for_each_run
from dist_mem.studies.runs import Run, all_runs, train_words
from tests.support.jobs import build_books, logged_steps, write_config
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT

GRID = {"memory": ["none.yaml", "memory/long.yaml"], "optimizer.lr": [0.001, 0.002], "model.dropout": [0.0]}


def write(folder: Path, **changes: Any) -> Path:
    sweep = {"train": ["job.yaml"], "grid": GRID, "data": "books", **changes}
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def rows(path: Path) -> dict[str, list[str]]:
    return load_sweep(path).scales[SCALE].rows


def test_every_combination_is_a_row_with_a_name_of_its_own(tmp_path: Path) -> None:
    found = rows(write(tmp_path, rows={"odd": ["model.d_model=32"]}))
    assert list(found) == [
        "none-lr0.001-dropout0.0", "none-lr0.002-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0",
        "odd",
    ]  # fmt: skip
    assert found["long-lr0.002-dropout0.0"] == ["memory/long.yaml", "optimizer.lr=0.002", "model.dropout=0.0"]


def test_a_sweep_that_comes_with_dist_mem_is_found_outside_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(rows(Path("configs/sweeps/memories.yaml"))) == ["none", "transformer_xl", "compressive"]
    with pytest.raises(UnusableError, match=r"there is no file configs/sweeps\b"):
        load_sweep(Path("configs/sweeps"))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_row_of_every_sweep_is_a_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scale = load_sweep(path).scales[SCALE]
    for run in all_runs(scale, Path("out"), [3], list(scale.rows)):
        config = load_config(train_words(scale, run, []), memory_options=memory_options)
        assert (config.train.seed, config.name) == (3, run.name)
        check_model(config)


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
        {"columns": {"a": {"figure": "accuracy", "evaluate": ["eval.mem_lne=4", "--without-memory"]}}},
        "row one: column a: command line: eval.mem_lne: unknown key; did you mean eval.mem_len?",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
@pytest.mark.parametrize("options", [[], ["--no-estimate"], ["--slurm"]], ids=" ".join)
def test_a_row_that_no_model_can_have_is_refused_before_any_run(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of configs/sweeps/babilong.yaml had too few basis functions; it was seen when four others had trained."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "job.yaml", tmp_path / "books", tmp_path / "unused", {})
    changes, reported = WRONG_ROWS[name]
    write(tmp_path, **{"grid": {}, "rows": {"one": ["memory.kind=none"]}, **changes})
    assert main(["sweep", "rates.yaml", *options]) == 2
    assert f"rates.yaml: {reported}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_more_runs_are_taken_if_the_command_allows_them(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=[*range(300)])
    assert len(load_sweep(path, max_runs=1200).scales[SCALE].seeds) == 300


def test_given_columns_stand_in_place_of_the_default(tmp_path: Path) -> None:
    assert list(load_sweep(write(tmp_path)).columns) == ["word_perplexity"]
    assert list(load_sweep(write(tmp_path, columns={"a": {"figure": "accuracy"}})).columns) == ["a"]


def test_combinations_with_all_values_of_a_condition_are_left_out(tmp_path: Path) -> None:
    found = rows(write(tmp_path, skip=[{"memory": "none", "optimizer.lr": 0.002}]))
    assert list(found) == ["none-lr0.001-dropout0.0", "long-lr0.001-dropout0.0", "long-lr0.002-dropout0.0"]


def test_overrides_that_belong_together_are_one_value(tmp_path: Path) -> None:
    size = ["model.d_model=64", "model.num_heads=4"]
    assert rows(write(tmp_path, grid={"size": [size], "train.compile": [True, None]})) == {
        "sizemodel.d_model_64_model.num_heads_4-compileTrue": [*size, "train.compile=true"],
        "sizemodel.d_model_64_model.num_heads_4-compileNone": [*size, "train.compile=null"],
    }


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"skip": [{"memroy": "none"}]}, "skip[0] has 'memroy', which is not a key of the grid; did you mean memory?"),
        ({"skip": [{"optimizer.lr": 0.1}]}, "skip[0]: optimizer.lr never has the value 0.1; it has [0.001, 0.002]"),
        ({"grid": {"optimizer.lr": []}}, "grid.optimizer.lr has no values"),
        ({"grid": {}}, "has neither grid nor rows"),
        ({"grid": {"memory": ["a/x.yaml", "b/x.yaml"]}}, "two rows are called 'x'"),
        ({"sedes": [1]}, "Key 'sedes' not in 'Sweep'"),
        ({"rows": {"a/b": []}}, "row 'a/b' names files"),
        ({"seeds": [0, 0]}, "seeds is [0, 0], but must be different numbers of at least 0"),
        ({"seeds": [-1]}, "seeds is [-1], but must be different numbers of at least 0"),
        ({"seeds": []}, "seeds is [], but must be different numbers of at least 0"),
        ({"columns": {"a": {"figure": "acuracy"}}}, "figure 'acuracy', which evaluate does not measure: did you mean"),
        ({"columns": {"a": {"figure": "accuracy", "command": "dialogue"}}}, "which dialogue does not measure; it me"),
        (
            {"grid": {f"model.k{number}": [*range(20)] for number in range(7)}},
            "are 1,280,000,000 runs, more than 1,000",
        ),
        ({"seeds": [*range(300)]}, "4 combinations and rows with 300 seeds are 1,200 runs, more than 1,000: give few"),
    ],
)
def test_what_a_sweep_cannot_mean_is_refused(tmp_path: Path, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UnusableError) as caught:
        load_sweep(write(tmp_path, **changes))
    assert reported in str(caught.value)
    assert "rates.yaml" in str(caught.value)


@pytest.mark.parametrize("command", ["sweep", "sweep --slurm", "arena", "arena --slurm"])
def test_a_file_that_is_not_there_leaves_nothing_behind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    assert main([name, "nope.yaml", *options]) == 2
    assert "there is no file nope.yaml" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_at_one_time_share_the_cores_and_no_gpu() -> None:
    assert places(1, 4, num_cores=8, gpus=list("0123")) == [Place()], "one alone has all, as without a sweep"
    assert [place.environment for place in places(2, 2, num_cores=9, gpus=[])] == [{"OMP_NUM_THREADS": "2"}] * 2
    found = places(2, 2, num_cores=2, gpus=["2", "3", "GPU-a", "GPU-b", "9"])
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == ["2,3", "GPU-a,GPU-b"]
    with pytest.raises(UnusableError, match="--jobs 3 with --ranks 2 takes 6 GPUs, but here are 5"):
        places(3, 2, num_cores=2, gpus=list("01234"))


def test_the_end_is_that_of_the_last_place() -> None:
    assert finish_seconds([5.0, 3.0, 4.0, 1.0], 2) == 7.0
    run = Run("none", "", 0, Path())
    *_, last = report([Estimate(run, 10, 2_000_000, 0.5, 5400.0)] * 2, num_places=1, ranks=4, device="GPU")
    assert "2 runs: 4 M tokens, 12 GPU-hours; with --jobs 1 about 3:00:00, until " in last


@pytest.fixture
def job(tmp_path: Path) -> Job:
    table = load_sweep(write(tmp_path))
    scale = table.scales[SCALE]
    return Job(table, scale, tmp_path, all_runs(scale, tmp_path, [0], list(scale.rows)), 1, [], StopSignal([]))


DIES_AT_FIRST = "import os, sys; n = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_RDWR); os.write(n, b'x')"
DIES_AT_FIRST += "; sys.exit(0 if os.fstat(n).st_size > int(sys.argv[2]) else int(sys.argv[3]))"


def start(job: Job, codes: dict[str, tuple[int, int]], item: Run, tell: Callable[[str], None], place: Place) -> None:
    times, code = codes.get(item.row, (0, 0))
    job.command([sys.executable, "-c", DIES_AT_FIRST, str(job.out / item.row), str(times), str(code)], item.name)


def test_a_run_that_died_is_started_again_and_stops_no_other(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third, fourth = (run.row for run in job.runs)
    codes = {first: (2, 1), second: (99, 137), third: (99, 2)}
    errors = for_each_run(job, job.runs, [Place(), Place()], partial(start, job, codes), restarts=2)
    assert [error.code for error in errors if isinstance(error, CommandError)] == [137, 2]
    starts = {run.row: (job.out / run.row).stat().st_size for run in job.runs}
    assert starts == {first: 3, second: 3, third: 1, fourth: 1}, "wrong input is not started again"
    assert f"{first}-seed0: ended with exit code 1; it is started again" in capsys.readouterr().out


def sweep(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dist_mem", "sweep", "rates.yaml", *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trials_save_and_track_like_the_runs_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    """A sweep of 250 steps took 1:10 and not 0:55, because its trials had neither checkpoints nor MLflow."""
    data = build_books(tmp_path)
    settings = {"train": {"steps": 60}, "tracking": {"mlflow": True, "uri": "sqlite:///store.db"}}
    write_config(tmp_path / "job.yaml", data, tmp_path / "unused", settings)
    columns = {"dev": {"figure": "token_perplexity", "split": "validation"}}
    write(tmp_path, grid={"memory.kind": ["none"]}, columns=columns, data=str(data), seeds=[0])
    before = {path.name for path in tmp_path.iterdir()}
    process = sweep(tmp_path, "--estimate", "--out", str(out := tmp_path / "out"))
    text = process.communicate(timeout=limit(400))[0]
    assert process.returncode == 0, text
    (kept,) = (out / "estimates").glob("*.json")
    assert json.loads(kept.read_text(encoding="utf-8"))["saving"] > 0.0
    log = "".join(path.read_text(encoding="utf-8") for path in (out / "logs").iterdir())
    assert "estimates/mlflow/store.db" in log, "it was tracked"
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}
    assert [path.name for path in (out / "estimates").rglob("*") if path.is_file()] == [kept.name]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_says_what_it_takes_and_survives_a_killed_row(tmp_path: Path) -> None:
    data = build_books(tmp_path)
    steps = {"train": {"steps": 60}, "checkpoint": {"every": 10}}
    write_config(tmp_path / "job.yaml", data, tmp_path / "unused", steps)
    columns = {"dev": {"figure": "token_perplexity", "split": "validation"}}
    write(tmp_path, grid={"memory.kind": ["none", "causal"]}, columns=columns, data=str(data), seeds=[0])

    out = tmp_path / "out"  # as a whole path, it is that of this test alone
    process = sweep(tmp_path, "--jobs", "2", "--out", str(out))
    run = out / "runs" / "kindnone-seed0"
    wait_until(lambda: process.poll() is not None or len(logged_steps(run)) > 15, "some steps", seconds=400)
    found = subprocess.run(["pkill", "-KILL", "-f", f"train.*run_dir={run}"], check=False)
    assert found.returncode == 0, "a training to kill"
    text = process.communicate(timeout=limit(600))[0]
    assert process.returncode == 0, text
    assert "2 runs: " in text
    assert "tokens, " in text
    assert f"kindnone-seed0: ended with exit code {-signal.SIGKILL}; it is started again" in text
    assert "the estimate was" in text
    assert (out / "table.png").is_file()
    with (out / "table.csv").open() as lines:
        assert [row["ended"] for row in csv.DictReader(lines)] == ["evaluated", "evaluated"]
    assert all(logged_steps(out / "runs" / f"kind{kind}-seed0")[-1] == 60 for kind in ("none", "causal"))

    again = sweep(tmp_path, "--jobs", "2", "--out", str(out))
    assert "already done" in again.communicate(timeout=limit(300))[0]
    assert again.returncode == 0

"""A table of a paper, end to end: every row trained and evaluated once, also after a kill; a diverged row says so."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.config import load_config
from dist_mem.errors import EXIT_REQUEUE, EXIT_USAGE, UnusableError
from dist_mem.launch.local import launcher, tied
from dist_mem.memory import memory_options
from dist_mem.papers.figures import figures
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.command import _close as close_parent
from dist_mem.studies.command import run as reproduce_here
from dist_mem.studies.job import Job, StoppedError
from dist_mem.studies.parent_run import ParentRun
from dist_mem.studies.results import cell, draw, to_markdown
from dist_mem.studies.runs import Run, all_runs, columns_of, keep_result, train_words
from dist_mem.studies.tables import FOLDER, Table, load_table, table_names
from dist_mem.tracking.mlflow.run import connect
from tests.support.jobs import build_books, write_config
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT

TABLES = table_names(ROOT / FOLDER)
STEPS = 40


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name == "infinite.fig3" else pytest.mark.slow) for name in TABLES],
)
def test_every_row_of_every_table_is_a_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = load_table(name)
    assert set(table.scales) <= {"tiny", "small", "paper"}
    assert "tiny" in table.scales
    for scale in table.scales.values():
        for run in all_runs(scale, Path("out"), [3], list(scale.rows)):
            config = load_config(train_words(scale, run, []), memory_options=memory_options)
            assert (config.train.seed, config.name) == (3, run.name)
        for point in scale.points.values():
            words = [word for command in point.build for word in command]
            assert [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()] == []


def test_the_papers_figures_stand_under_columns_of_a_scale() -> None:
    for name in TABLES:
        table = load_table(name, ROOT / FOLDER)
        columns = {*table.columns, *(column for scale in table.scales.values() for column in scale.columns)}
        assert {column for row in table.rows.values() for column in row.paper} <= columns, name


def test_every_figure_is_made_by_a_table_from_as_many_rows_as_it_shows() -> None:
    made = {figure: rows for name in TABLES for figure, rows in load_table(name, ROOT / FOLDER).figures.items()}
    assert set(made) == set(figures())
    for name, rows in made.items():
        assert figures()[name].least_runs <= len(rows) <= figures()[name].most_runs, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to work in, with a table of two rows that takes seconds."""
    data = build_books(tmp_path)
    write_config(
        tmp_path / "job.yaml", data, tmp_path / "unused", {"train": {"steps": STEPS}, "checkpoint": {"every": 5}}
    )
    table = {
        "title": "Two memories",
        "source": "nobody",
        "rows": {"none": {"name": "None", "paper": {"test": 1.5}}, "xl": {"name": "XL"}},
        "columns": {
            "dev": {"figure": "token_perplexity", "split": "validation"},
            "test": {"figure": "token_perplexity"},
        },
        "scales": {
            "tiny": {
                "about": "Seconds.",
                "train": ["job.yaml", "tracking.mlflow=true", "tracking.uri=sqlite:///store.db"],
                "rows": {"none": ["memory.kind=none"], "xl": []},
                "points": {"": {"data": str(data)}},
            }
        },
    }
    write_table(tmp_path, table)
    return tmp_path


def write_table(folder: Path, table: dict[str, Any]) -> None:
    path = folder / FOLDER / "two.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(table, sort_keys=False))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dist_mem", "reproduce", "two", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=limit(600))
    return process.returncode, out, errors


def values(folder: Path, out: str) -> dict[tuple[str, str], str]:
    rows = csv.DictReader((folder / out / "table.csv").read_text().splitlines())
    return {(row["row"], row["column"]): row["value"] for row in rows}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_killed_table_goes_on_and_ends_as_one_left_alone(folder: Path) -> None:
    code, text, errors = finish(start(folder, "--out", "whole"))
    assert code == 0, errors
    assert "| None | 1.5 |" in text.partition("## The paper's figures")[2]
    assert (folder / "whole" / "table.png").stat().st_size > 0

    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(folder, "--out", "killed")
        checkpoints = folder / "killed" / "runs" / ("none-seed0" if number == signal.SIGTERM else "xl-seed0")
        wait_until(
            lambda where=checkpoints, process=process: (
                process.poll() is not None or list(where.glob("checkpoints/step-*"))
            ),
            "a checkpoint",
            seconds=200,
        )
        if number == signal.SIGTERM:
            process.terminate()  # of the command alone: it tells its training
            assert finish(process)[0] == EXIT_REQUEUE
        else:
            os.killpg(process.pid, number)
            process.communicate()
    code, text, errors = finish(start(folder, "--out", "killed"))
    assert code == 0, errors
    assert "none-seed0: already done" in text
    assert values(folder, "killed") == values(folder, "whole")
    assert all(values(folder, "killed").values())


@pytest.mark.nightly
def test_figures_are_drawn_from_the_rows_that_they_show(folder: Path) -> None:
    table = yaml.safe_load((folder / FOLDER / "two.yaml").read_text())
    write_table(
        folder, {**table, "figures": {"lamemo.fig7": ["xl"], "lamemo.fig8": ["xl", "none"], "lamemo.fig6": ["xl"]}}
    )
    code, text, errors = finish(start(folder, "--out", "out", "--rows", "xl", "train.steps=2", "checkpoint.every=null"))
    assert code == 0, errors
    assert "lamemo.fig7: out/figures" in text
    assert "lamemo.fig6 is not drawn: " in errors  # it has no alpha
    assert {path.name.partition("-")[0] for path in (folder / "out" / "figures").iterdir()} == {"lamemo.fig7"}
    write_table(folder, {**table, "figures": {"lamemo.fig7": ["lamemo"]}})
    with pytest.raises(UnusableError, match=r"figures\.lamemo\.fig7 has 'lamemo', which is not a row"):
        load_table(str(folder / FOLDER / "two.yaml"))


@pytest.mark.slow
def test_runs_stand_under_a_parent_in_mlflow(folder: Path) -> None:
    assert finish(start(folder, "--out", "out", "--rows", "xl", "train.steps=2", "checkpoint.every=null"))[0] == 0
    from dist_mem.tracking.mlflow.run import connect

    client = connect(f"sqlite:///{folder / 'store.db'}")
    parent = client.get_run((folder / "out" / "mlflow_run_id").read_text().strip())
    (child,) = client.search_runs(
        [parent.info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    assert (parent.info.status, child.info.status, child.info.run_name) == ("FINISHED", "FINISHED", "xl-seed0")
    expected = float(values(folder, "out")["xl", "test"])
    assert parent.data.metrics["xl/test"] == expected
    assert child.data.metrics["eval/test/token_perplexity"] == expected


@pytest.mark.slow
def test_a_row_that_diverges_is_a_row_that_says_so(folder: Path) -> None:
    options = ["--rows", "xl", "--out", "out", "optimizer.kind=sgd", "optimizer.lr=1e30", "tracking.mlflow=false"]
    code, text, errors = finish(start(folder, *options))
    assert code == 0, errors
    assert "| XL | 1 diverged | 1 diverged |" in text


def test_what_cannot_be_run_is_refused(folder: Path) -> None:
    code, _, errors = finish(start(folder, "--rows", "xll"))
    assert code == EXIT_USAGE
    assert "'xll' is not a row of two at scale tiny: did you mean xl?; rows are: none, xl" in errors
    with pytest.raises(UnusableError, match=r"there is no table 'three'; .* or the name of one: two"):
        load_table("three", folder / FOLDER)
    table = yaml.safe_load((folder / FOLDER / "two.yaml").read_text())
    write_table(folder, {**table, "rowz": {}})
    with pytest.raises(UnusableError, match=r"two.yaml: Key 'rowz' not in 'Table'"):
        load_table("two", folder / FOLDER)
    table["scales"]["tiny"]["points"] = {"other": {"data": "x"}}
    write_table(folder, table)
    with pytest.raises(UnusableError, match=r"scales.tiny.points lacks '', the point of column 'dev'"):
        load_table("two", folder / FOLDER)
    table["scales"]["tiny"]["points"] = {"": {"data": "x"}}
    write_table(folder, {**table, "x_axis": "tokens"})
    with pytest.raises(UnusableError, match=r"column 'dev' is not a number, which x_axis requires"):
        load_table("two", folder / FOLDER)


@pytest.mark.slow
def test_a_changed_definition_does_not_mix_with_old_runs(folder: Path) -> None:
    (folder / "out" / "runs").mkdir(parents=True)
    (folder / "out" / "made_from.txt").write_text("something else")
    code, _, errors = finish(start(folder, "--out", "out"))
    assert code == EXIT_USAGE
    assert "holds runs of another two" in errors


def measured(folder: Path, rows: list[str], seed: int = 0) -> None:
    """As if these rows had been trained and evaluated, with 2.5 in every column."""
    for row in rows:
        for column in ("dev", "test"):
            keep_result(Run(row, "", seed, folder / "out"), column, {"value": 2.5, "step": STEPS})


def reproduce(*extra: str, scale: str = "tiny", rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> int:
    return reproduce_here("two", scale=scale, out=Path("out"), rows=rows, seeds=seeds, ranks=1, extra=extra)


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    table = yaml.safe_load((folder / FOLDER / "two.yaml").read_text())
    change(table)
    write_table(folder, table)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the current one, with a table that is not tracked and has a second scale."""

    def change(table: dict[str, Any]) -> None:
        tiny = table["scales"]["tiny"]
        table["scales"]["small"] = {**tiny, "train": [*tiny["train"], "train.steps=50"]}
        tiny["train"].append("tracking.mlflow=false")

    changed(folder, change)
    monkeypatch.chdir(folder)
    return folder


def test_figures_of_one_scale_are_not_those_of_another(here: Path) -> None:
    measured(here, ["none", "xl"])
    assert reproduce() == 0
    with pytest.raises(UnusableError, match="the scale or the overrides have changed"):
        reproduce(scale="small")


def test_figures_of_one_configuration_file_are_not_those_of_another(here: Path) -> None:
    """What is measured is not trained again, so nothing else would compare them."""
    measured(here, ["none", "xl"])
    assert reproduce() == 0
    text = (here / "job.yaml").read_text()
    (here / "job.yaml").write_text(f"# a comment changes nothing\n{text}")
    assert reproduce() == 0
    (here / "job.yaml").write_text(text.replace("seg_len: 16", "seg_len: 32"))
    with pytest.raises(
        UnusableError, match=r"out holds runs of another two: job\.yaml has changed since; give another"
    ):
        reproduce()


def test_a_folder_of_an_earlier_version_is_taken_up(here: Path) -> None:
    """It has noted no configuration files."""
    measured(here, ["none", "xl"])
    assert reproduce() == 0
    made_from = here / "out" / "made_from.txt"
    made_from.write_text("".join(made_from.read_text().splitlines(keepends=True)[:3]))
    assert reproduce() == 0
    assert "job.yaml" in made_from.read_text()


def test_a_call_that_came_to_nothing_binds_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(here, lambda table: table["scales"]["tiny"]["points"].update({"": {"data": "nowhere"}}))
    with pytest.raises(UnusableError, match="stepz"):
        reproduce("train.stepz=5")
    assert reproduce("train.steps=5") == EXIT_USAGE
    assert "nowhere is missing" in capsys.readouterr().err
    measured(here, ["none", "xl"])
    with pytest.raises(UnusableError, match="holds runs of another two"):
        reproduce()


def test_rows_and_seeds_of_earlier_calls_stay_in_the_table(here: Path) -> None:
    measured(here, ["none"])
    measured(here, ["xl"])
    measured(here, ["xl"], seed=1)
    assert reproduce(rows=["none"]) == 0
    assert values(here, "out") == dict.fromkeys(
        [(row, name) for row in ("none", "xl") for name in ("dev", "test")], "2.5"
    )
    assert reproduce(rows=["xl"], seeds=[1]) == 0
    text = (here / "out" / "table.md").read_text()
    assert "| None | 2.5 | 2.5 |" in text
    assert "| XL | 2.5 ± 0 | 2.5 ± 0 |" in text
    assert "- seeds: 0, 1" in text


def test_what_is_measured_is_reported_where_data_of_another_row_are_missing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(here, lambda table: table["scales"]["tiny"]["points"].update({"": {"data": "nowhere"}}))
    measured(here, ["none"])
    assert reproduce() == EXIT_USAGE
    captured = capsys.readouterr()
    assert "| None | 2.5 | 2.5 |" in captured.out
    assert "error: nowhere is missing, and the table cannot build it" in captured.err
    for split in ("train", "tset"):
        (here / "nowhere" / split).mkdir(parents=True)
        (here / "nowhere" / split / "index.json").touch()
    assert reproduce() == EXIT_USAGE
    assert "error: nowhere has no split 'test': it has train, tset; did you mean tset?" in capsys.readouterr().err


def test_without_mlflow_a_table_is_made_all_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(here, ["none", "xl"])
    uri = f"http://127.0.0.1:{free_port()}"
    assert reproduce(f"tracking.uri={uri}", "tracking.mlflow=true") == 0
    captured = capsys.readouterr()
    assert "MLflow has no run for the table: MlflowException: " in captured.err
    assert "| XL | 2.5 |" in captured.out
    parent = object.__new__(ParentRun)
    parent.run_id, parent._client = "0", connect(uri)
    job = Job(load_table("two"), load_table("two").scales["tiny"], Path("out"), [], 1, [], StopSignal([]))
    close_parent(parent, job, [Path("out/table.md")], "FINISHED")
    assert "MLflow did not receive the table: MlflowException: " in capsys.readouterr().err


@pytest.mark.slow
def test_mlflow_takes_the_figures_of_every_table(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    experiment = client.get_experiment_by_name("dist_mem")
    parent = object.__new__(ParentRun)
    parent.run_id, parent._client = client.create_run(experiment.experiment_id).info.run_id, client
    figures = {}
    for name in TABLES:
        table = load_table(name, ROOT / FOLDER)
        columns = {column for scale in table.scales.values() for column in columns_of(table, scale)}
        figures |= {f"{row}/{column}": 1.0 for row in table.rows for column in columns}
    parent.close(figures, [], status="FINISHED")
    assert client.get_run(parent.run_id).data.metrics == figures


def test_one_call_at_a_time_works_in_a_folder(here: Path) -> None:
    measured(here, ["none", "xl"])
    with (here / "out" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnusableError, match="another call of the command uses this folder"):
            reproduce()
    assert reproduce() == 0


RANK = """
import os, signal, time
from pathlib import Path

def save(number, frame):
    Path(f"saved-{os.environ['RANK']}").touch()
    os._exit(85)

signal.signal(signal.SIGTERM, save)
Path(f"up-{os.environ['RANK']}").touch()
time.sleep(200)
"""


@pytest.mark.slow
def test_a_signal_reaches_the_ranks_before_the_command_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    table = load_table("lamemo.table1", ROOT / FOLDER)
    stop = StopSignal([])
    job = Job(table, table.scales["tiny"], tmp_path, [], 2, [], stop, {"PYTHONPATH": str(tmp_path)})

    def tell() -> None:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks")
        stop.received = "SIGTERM"

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(StoppedError):
        job.command([*launcher(2)[:-1], "a_rank"], "train")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert launcher(2) != launcher(2)  # a port of its own, so that two tables do not meet


def test_a_setpriv_that_knows_no_death_signal_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of RHEL 8 (util-linux 2.32) and of busybox: every command of a table would end with its usage."""
    (tmp_path / "setpriv").write_text("#!/bin/sh\necho \"setpriv: unrecognized option '$1'\" >&2\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert tied(["train"]) == ["train"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (util-linux)")
def test_a_training_saves_when_the_command_is_killed(tmp_path: Path) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    starts = f"import subprocess; subprocess.run({tied([sys.executable, 'a_rank.py'])!r})"
    table = subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path, env={**os.environ, "RANK": "0"})
    wait_until(lambda: (tmp_path / "up-0").exists(), "the training")
    table.kill()
    table.wait()
    wait_until(lambda: (tmp_path / "saved-0").exists(), "what it saves")


def test_cells_tell_seeds_apart(tmp_path: Path) -> None:
    table: Table = load_table("lamemo.table1", ROOT / FOLDER)
    scale = table.scales["tiny"]
    runs = all_runs(scale, tmp_path, [0, 1, 2], ["lamemo"])
    facts: list[dict[str, Any]] = [{"value": 2.0, "step": 1}, {"value": 3.0, "step": 1}, {"diverged": "why"}]
    for run, fact in zip(runs, facts, strict=True):
        keep_result(run, "test", fact)
    assert str(cell(runs, "test")) == "2.5 ± 0.5, 1 diverged"
    assert str(cell(runs, "dev")) == "3 to run"
    text = to_markdown(table, scale, runs, {"seeds": "0, 1, 2"})
    assert "| LaMemo | 3 to run | 2.5 ± 0.5, 1 diverged |" in text
    draw(table, scale, runs, tmp_path / "table.png")
    assert json.loads(Run("lamemo", "", 0, tmp_path).result("test").read_text()) == {"value": 2.0, "step": 1}

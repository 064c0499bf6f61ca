"""The runner of studies, end to end: every row trained and measured once, also after a stop or a kill."""

import csv
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import dist_mem.studies.run_study as run_study_module
from dist_mem.checkpoint.finished_file import mark_finished
from dist_mem.checkpoint.manifest import step_dir, write_manifest
from dist_mem.config import LaunchConfig, load_config, save_config
from dist_mem.data.index import fingerprint_of
from dist_mem.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.evaluation.scores import read_report
from dist_mem.launch.status import run as show_status
from dist_mem.memory import memory_options
from dist_mem.runtime.children import die_with_parent, launcher
from dist_mem.runtime.locks import hold_folder
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.cells import CellRun, checksum, keep_result, read_cell, speed_of, write_cell
from dist_mem.studies.cells import finish as finish_cell
from dist_mem.studies.definition import compare
from dist_mem.studies.estimate import Estimate, estimate, finish_seconds, report
from dist_mem.studies.estimate import _settings as trial_settings
from dist_mem.studies.estimate import _try as time_row
from dist_mem.studies.page import to_csv
from dist_mem.studies.parent_run import ParentRun
from dist_mem.studies.row_check import check
from dist_mem.studies.run_study import StudyRequest, take_cells
from dist_mem.studies.run_study import _close as close_parent
from dist_mem.studies.run_study import _estimate as estimate_study
from dist_mem.studies.run_study import _places as places_of
from dist_mem.studies.run_study import run as run_study
from dist_mem.studies.runs import all_runs, definition_of, train_words
from dist_mem.studies.study import FOLDER, load_study
from dist_mem.studies.study_call import (
    CommandError,
    Place,
    StudyCall,
    StudyStoppedError,
    begin,
    build,
    columns_left,
    for_each_run,
    places,
    run_one,
)
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, Point, new_uid, write_log
from dist_mem.tracking.mlflow.client import connect
from tests.support import tracked
from tests.support.curricula import make_data
from tests.support.jobs import build_books, logged_steps, write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said
from tests.support.paths import ROOT
from tests.support.small_studies import SWEEP, load, two_memories
from tests.support.small_studies import write as write_study

STEPS = 40
DEV = {"dev": {"metric": "token_perplexity", "split": "validation"}}
ONE_ROW = {"kindnone": ["memory.kind=none"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to work in, with a table of two rows that takes seconds."""
    data = build_books(tmp_path)
    changes = {"train": {"steps": STEPS}, "checkpoint": {"every": 5}}
    write_config(tmp_path / "job.yaml", data, tmp_path / "unused", changes)
    train = ["job.yaml", "tracking.mlflow=true", "tracking.uri=sqlite:///store.db"]
    table = two_memories(str(data), "tiny", train=train)
    write_table(tmp_path, {**table, "columns": {**DEV, **table["columns"]}})
    return tmp_path


def write_table(folder: Path, table: dict[str, Any]) -> None:
    path = folder / FOLDER / "two.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(table, sort_keys=False))


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    table = yaml.safe_load((folder / FOLDER / "two.yaml").read_text())
    change(table)
    write_table(folder, table)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "dist_mem", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=limit(600))
    return process.returncode, out, errors


def done(folder: Path, *arguments: str) -> str:
    code, text, errors = finish(start(folder, *arguments))
    assert code == EXIT_DONE, errors
    return text


def lines_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))


def values(folder: Path) -> dict[tuple[str, str], str]:
    return {(line["row"], line["column"]): line["value"] for line in lines_of(folder)}


def test_runs_stand_under_a_parent_in_mlflow_and_figures_are_drawn_of_them(folder: Path) -> None:
    figures = {"lamemo.fig7": ["xl"], "lamemo.fig8": ["xl", "none"], "lamemo.fig6": ["xl"]}
    changed(folder, lambda table: table.update(figures=figures))
    options = ("--out", "out", "--rows", "xl", "train.steps=2", "checkpoint.every=null", "eval.every=1")
    code, text, errors = finish(start(folder, "reproduce", "two", *options))
    assert code == EXIT_DONE and "lamemo.fig7: out/figures" in text, errors
    assert "lamemo.fig6 is not drawn: " in errors  # it has no alpha
    assert {path.name.partition("-")[0] for path in (folder / "out" / "figures").iterdir()} == {"lamemo.fig7"}
    client = connect(f"sqlite:///{folder / 'store.db'}")
    parent = client.get_run((folder / "out" / "mlflow_run_id").read_text().strip())
    (child,) = client.search_runs(
        [parent.info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    assert (parent.info.status, child.info.status, child.info.run_name) == ("FINISHED", "FINISHED", "xl-seed0")
    assert {"table.md", "table.csv", "table.png"} <= {file.path for file in client.list_artifacts(parent.info.run_id)}
    expected = float(values(folder / "out")["xl", "test"])
    assert parent.data.metrics["xl/test"] == expected
    assert child.data.metrics["eval/test/token_perplexity"] == expected
    evaluated = client.get_metric_history(child.info.run_id, "eval/validation/bits_per_byte")
    kept = read_cell(folder / "out" / "cells" / "xl-seed0.json")["evaluations"]
    assert len(kept) == 2 and kept == [[point.step, point.value] for point in evaluated[:2]]


def test_a_row_that_diverges_is_a_row_that_says_so(folder: Path) -> None:
    options = ("--rows", "xl", "--out", "out", "optimizer.kind=sgd", "optimizer.lr=1e30", "tracking.mlflow=false")
    assert "| XL | 1 diverged | 1 diverged |" in done(folder, "reproduce", "two", *options)


def measured(folder: Path, rows: list[str], seed: int = 0) -> None:
    """As if these rows had been trained and evaluated, with 2.5 in every column."""
    for row in rows:
        for name, column in load_study("two", folder=folder / FOLDER).columns.items():
            result = {"value": 2.5, "step": STEPS, "column": asdict(column)}
            keep_result(CellRun(row, "", seed, folder / "out"), name, result)


def reproduce(*extra: str, out: str = "out", **options: Any) -> int:
    return run_study(StudyRequest("two", "reproduce", out=Path(out), extra=extra, **options))


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


def test_cells_of_one_definition_are_not_those_of_another(here: Path) -> None:
    """What is measured is not trained again, so nothing else would compare them."""
    measured(here, ["none", "xl"])
    assert reproduce(cells=Path("cells")) == EXIT_DONE
    with refused(UnusableError, "none-seed0.json", "train.steps was 40 and is 50"):
        reproduce(scale="small")
    text = (here / "job.yaml").read_text()
    (here / "job.yaml").write_text(f"# a comment changes nothing\n{text}")
    assert reproduce(out="another", cells=Path("cells")) == EXIT_DONE  # with the cells of the first, and no training
    made = read_cell(Path("cells/none-seed0.json"))["made"]
    assert {"date", "commit", "processor", "version.torch"} <= made.keys(), "bits depend on these"
    assert values(here / "another") == values(here / "out")
    with refused(UnusableError, "optimizer.lr was 0.003 and is 0.5"):
        reproduce("optimizer.lr=0.5", out="third", cells=Path("cells"))
    assert not (here / "third").exists()
    (here / "job.yaml").write_text(text.replace("seg_len: 16", "seg_len: 32"))
    with refused(UnusableError, "train.seg_len was 16 and is 32"):
        reproduce()
    changed(here, lambda table: table["columns"]["test"].update(split="validation"))
    (here / "job.yaml").write_text(text)
    with refused(UnusableError, "column 'test'"):
        reproduce()


def train_folder(run: CellRun, *extra: str, fingerprint: str, ranks: int = 1) -> None:
    """As if a training of a run had saved a checkpoint, on data of this fingerprint, and its cell had been removed."""
    config = load_config(train_words(load_study("two"), run, extra), memory_options=memory_options)
    save_config(config, run.directory / "config.yaml")
    folder = step_dir(run.directory, STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    fingerprints = {"data_fingerprint": fingerprint, "tokenizer_fingerprint": ""}
    empty: dict[str, Any] = {key: {} for key in ("files", "versions", "lanes", "meter")}
    counts = {"step": STEPS, "world_size": ranks, "zero_stage": 0}
    write_manifest(folder, {**empty, **fingerprints, **counts, "mlflow_run_id": None})


def test_a_trained_model_is_not_measured_under_another_definition(here: Path) -> None:
    """A finished run is not trained again, and a key such as optimizer.lr may change when it is started."""
    run = CellRun("xl", "", 0, Path("out"))
    study = load_study("two")
    job = StudyCall(study, Path("out"), [run], 1, ["eval.allow_code=true"], StopSignal([]))
    definition = definition_of(study, run, job.extra)
    train_folder(run, fingerprint=definition["data/train"])
    take_cells(job, print)  # a training that was begun in an earlier call goes on
    with refused(UnusableError, run.directory, "optimizer.lr was 0.003 and is 0.5"):
        reproduce("optimizer.lr=0.5")
    assert not run.cell.exists()
    train_folder(run, fingerprint="0" * 64)
    with refused(UnusableError, run.directory, "data/train was '0000"):
        take_cells(job, print)


def test_a_training_of_another_definition_than_its_cell_is_not_measured(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is begun when its job is submitted, and the job reads the files when it starts, hours later."""
    run = CellRun("xl", "", 0, Path("out"))
    study, stop = load_study("two"), StopSignal([])
    job = StudyCall(study, Path("out"), [run], 1, [], stop)
    definition = begin(job, run)
    train_folder(run, fingerprint=definition["data/train"])
    take_cells(job, print)

    def train(*_: object, **__: object) -> int:
        """As one that reads a file that has been edited since the call began."""
        train_folder(run, "optimizer.lr=0.5", fingerprint=definition["data/train"])
        return EXIT_DONE

    monkeypatch.setattr(StudyCall, "command", train)
    for measure in (lambda: run_one(job, run, print, {}), lambda: take_cells(job, print), lambda: begin(job, run)):
        with refused(UnusableError, run.directory, "optimizer.lr was 0.5 and is 0.003"):
            measure()


def test_a_definition_has_all_that_changes_results(here: Path) -> None:
    run = CellRun("none", "", 0, Path("out"))

    def added(*extra: str) -> dict[str, Any]:
        found = definition_of(load_study("two"), run, extra)
        return {key: value for key, value in found.items() if key not in usual or value != usual[key]}

    usual: dict[str, Any] = {}
    usual = added()
    assert {key.partition(".")[0] for key in usual} >= {"train", "data", "data/train"}
    assert not added("divergence.window=128", "deepspeed.bf16.immediate_grad_update=auto")
    words = {"divergence.spike_z": 3.0, "deepspeed.fp16.loss_scale": 8, "deepspeed.communication_data_type": "fp16"}
    assert added(*(f"{key}={value}" for key, value in words.items())) == words
    faster = added("train.micro_batch_size=1", "train.threads=3", "model.attention=simple", "deepspeed.dump_state=true")
    assert len(faster) == 4
    compare(usual, usual | faster, "a cell", "")  # of the same definition
    (here / "mine.py").write_text((ROOT / "examples" / "averages.py").read_text())
    first = added("memory.kind=mine.py:Averages")
    (here / "mine.py").write_text((here / "mine.py").read_text() + "\nCHANGED = True\n")
    changed = added("memory.kind=mine.py:Averages")
    assert [key for key in first if first[key] != changed[key]] == ["memory/mine.py"]


def test_the_split_that_is_trained_on_is_part_of_the_definition(here: Path) -> None:
    changed(here, lambda table: table["scales"]["tiny"]["train"].append("data.train_split=mine"))
    study, run = load_study("two"), CellRun("none", "", 0, Path("out"))
    (path,) = {Path(point.data) for point in study.points.values()}
    (path / "train").rename(path / "mine")
    for record in path.glob("*/build.json"):  # of one build, in which no split is called so
        record.unlink()
    index = path / "mine" / "index.json"
    body = json.loads(index.read_text()) | {"split": "mine"}
    index.write_text(json.dumps(body | {"fingerprint": fingerprint_of(body)}))
    build(StudyCall(study, Path("out"), [run], 1, [], StopSignal([])), run, print)
    found = definition_of(study, run, [])
    assert [key for key in found if key.startswith("data/")] == ["data/mine", "data/test", "data/validation"]


def test_the_sources_of_a_mixture_are_part_of_the_definition_and_all_in_a_check(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, run = load_study("two"), CellRun("none", "", 0, Path("out"))
    folders = [make_data(tmp_path / name, [20 + number for number in range(9)]) for name in ("books", "chat")]
    mixture = [f"data.mixture=[{', '.join(f'{{path: {folder}}}' for folder in folders)}]"]
    first = definition_of(study, run, mixture)
    make_data(folders[1], [30 + number for number in range(9)])
    second = definition_of(study, run, mixture)
    assert [key for key in first if first[key] != second[key]] == ["data/mixture/1"]
    with refused(UnusableError, "data/mixture/1"):
        compare(first, second, "a cell", "")
    (path,) = {Path(point.data) for point in study.points.values()}
    shutil.rmtree(path / "train")  # which is read only if it is one of the sources
    build(StudyCall(study, Path("out"), [run], 1, mixture, StopSignal([])), run, print)
    capsys.readouterr()
    assert check(load_study("two"), rows=["none"], ranks=1, extra=mixture) == EXIT_DONE
    said(" ".join(capsys.readouterr().out.split()), "books: weight 50.00%", "chat: weight 50.00%")
    with refused(UnusableError, path):
        build(StudyCall(study, Path("out"), [run], 1, [], StopSignal([])), run, print)


def test_what_is_submitted_begins_its_cells(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else the next call with another definition would take over the training of this one."""
    monkeypatch.setattr("dist_mem.studies.run_study.submit_array", lambda runs, config, **options: EXIT_DONE)
    assert reproduce(launch=load_config(["job.yaml"]).launch) == EXIT_DONE
    with refused(UnusableError, "none-seed0.json", "train.steps was 40 and is 50"):
        reproduce(scale="small")


def test_the_status_of_a_submitted_study_is_that_of_its_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study itself was taken for a run that has no job, and hid them all."""
    monkeypatch.setattr("dist_mem.studies.run_study.submit_array", lambda *_, **__: EXIT_DONE)
    assert reproduce(launch=LaunchConfig()) == EXIT_DONE
    runs = [f"out/runs/{row}-seed0" for row in ("none", "xl")]
    for run in runs:
        (here / run / "slurm").mkdir(parents=True)
    shutil.copytree(here / "out" / "array", here / "out" / "slurm")  # where version 0.1.0 kept it
    capsys.readouterr()
    assert show_status([Path("out")], as_json=True) == EXIT_DONE
    assert [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()] == runs


def test_all_runs_of_an_array_start_from_one_copy_of_code_and_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each made one at its first start, hours later: rows of one table were trained by different code."""
    (here / "own.yaml").write_text("train: {threads: 1}\n", encoding="utf-8")
    changed(here, lambda table: table["scales"]["tiny"]["rows"]["xl"].append("own.yaml"))
    sbatch = here / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.touch(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    for answer, left in (("false", []), ("echo 7", ["snapshot"])):
        sbatch.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
        with suppress(UnfitError):
            assert reproduce(launch=LaunchConfig()) == EXIT_DONE
        assert [path.name for path in (here / "out" / "array").iterdir() if path.is_dir()] == left
    copy = here / "out" / "array" / "snapshot"
    scripts = [path.read_text(encoding="utf-8") for path in copy.parent.glob("*.sbatch")]
    assert sum("\nsnapshot=$(realpath out/array/snapshot)\n" in text for text in scripts) == 1, "of the second one"
    files = copy / "files" / here.relative_to("/")
    assert {path.name for path in files.iterdir()} == {"job.yaml", "own.yaml"}
    assert (copy / "code" / "dist_mem" / "model.py").is_file()


@pytest.mark.parametrize(("options", "place"), [("sweep --slurm", "check_trained"), ("arena --plan", "check_rows")])
def test_a_study_that_is_stopped_between_its_commands_submits_nothing(
    options: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C was noted, and the array of thousands of jobs submitted all the same."""
    command, option = options.split()
    study = write_small_study(tmp_path, monkeypatch, **({"budget": {"tokens": 5000}} if command == "arena" else {}))
    monkeypatch.setattr("dist_mem.studies.run_study.submit_array", lambda *_, **__: pytest.fail("submitted"))
    function = getattr(run_study_module, place)

    def stopped(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(run_study_module, place, function)
        return function(*arguments, **more)

    monkeypatch.setattr(run_study_module, place, stopped)
    launch = LaunchConfig() if option == "--slurm" else None
    asked = StudyRequest(study, command, out=Path("out"), launch=launch, plan=option == "--plan")
    assert run_study(asked) == EXIT_REQUEUE
    said(capsys.readouterr().err, "stopped", "out")


@pytest.mark.parametrize("command", ["sweep", "arena"])
def test_data_that_cannot_be_built_end_a_study_with_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"budget": {"tokens": 5000}} if command == "arena" else {}
    launch = LaunchConfig() if command == "sweep" else None  # a sweep builds where it submits
    for words, code in ((["false"], EXIT_FAILED), (["sh", "-c", "exit 2"], EXIT_USAGE)):
        study = write_small_study(tmp_path, monkeypatch, data="absent", build=[words], **changes)
        asked = StudyRequest(study, command, out=Path("out"), launch=launch)
        assert run_study(asked) == code
        said(capsys.readouterr().err, f"error: {words[0]}", f"exit code {code}", "build-absent.txt")

    def stop(*_: object, **__: object) -> int:
        raise StudyStoppedError

    monkeypatch.setattr(StudyCall, "command", stop)
    assert run_study(asked) == EXIT_REQUEUE


def write_small_study(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """Write a study of two rows without tracking in the folder to work in, and return its path."""
    data = build_books(folder)
    write_config(folder / "job.yaml", data, folder / "unused", {"tracking": {"mlflow": False}})
    monkeypatch.chdir(folder)
    rows = {"none": ["memory.kind=none"], "xl": ["memory.kind=transformer_xl"]}
    return write_study(folder, SWEEP, **{"grid": {}, "rows": rows, "columns": DEV, "data": str(data), **changes})


def test_a_call_that_came_to_nothing_binds_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(here, lambda table: table["scales"]["tiny"]["points"].update({"": {"data": "nowhere"}}))
    with refused(UnusableError, "train.stepz"):
        reproduce("train.stepz=5")
    for word in ("train.seed=7", "data.seed=7", "name=one", "run_dir=one"):  # all runs would be the same one
        for is_check in (False, True):
            with refused(UnusableError, word, "--seeds", "--out"):
                reproduce(word, check=is_check)
    with refused(UnusableError, "'xll'"):
        reproduce(rows=["xll"])
    assert reproduce("train.steps=5") == EXIT_USAGE
    assert "nowhere is missing" in capsys.readouterr().err


def test_rows_and_seeds_of_earlier_calls_stay_in_the_table(here: Path) -> None:
    measured(here, ["none"])
    measured(here, ["xl"])
    measured(here, ["xl"], seed=1)
    assert reproduce(rows=["none"]) == EXIT_DONE
    assert values(here / "out") == dict.fromkeys(
        [(row, name) for row in ("none", "xl") for name in ("dev", "test")], "2.5"
    )
    assert reproduce(rows=["xl"], seeds=[1]) == EXIT_DONE
    text = (here / "out" / "table.md").read_text()
    assert "| None | 2.5 | 2.5 |" in text
    assert "| XL | 2.5 ± 0 | 2.5 ± 0 |" in text
    assert "- seeds: 0, 1" in text


def test_the_table_has_the_days_and_commits_of_its_runs(here: Path) -> None:
    """It had those of the last call, also if that only wrote the table."""
    measured(here, ["none", "xl"])
    assert reproduce() == EXIT_DONE
    run = CellRun("none", "", 0, Path("out"))
    made = read_cell(run.cell)["made"]
    write_cell(run, made={**made, "date": "1999-12-31", "commit": "zzz"})
    assert reproduce() == EXIT_DONE
    text = (here / "out" / "table.md").read_text(encoding="utf-8")
    assert f"- date: 1999-12-31, {made['date']}\n- commit: {made['commit']}, zzz\n" in text


def test_a_cell_says_how_its_training_went(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said 1 rank of a job of Slurm with 8, the tokens/s of the few that are scored, and its last column's day."""
    run = CellRun("none", "", 0, Path("out"))
    train_folder(run, fingerprint="0" * 64, ranks=8)
    metrics = {"tokens_per_second": 5.0, "tokens_read_per_second": 90.0}
    entry = Entry("point", 0, {"step": STEPS, "metrics": metrics})
    write_log(run.directory / METRICS_FILE, Header(new_uid(), "none", None), [entry])
    finish_cell(run, date="1999-12-31")
    assert speed_of(run) == 90.0
    study = load_study("two")
    monkeypatch.setattr("dist_mem.studies.study_call._train_and_measure", lambda *_: None)
    run_one(StudyCall(study, Path("out"), [run], 1, [], StopSignal([]), made={"date": "2000-01-01"}), run, print, {})
    assert read_cell(run.cell)["made"] == {"date": "1999-12-31", "tokens_read_per_second": 90.0, "ranks": 8}
    found, *_ = csv.DictReader(to_csv(study, [run], []).splitlines())
    assert found["training"].startswith("torchrun --nproc_per_node 8 -m dist_mem train job.yaml")
    write_cell(run, made={"tokens_per_second": 70.0})
    assert speed_of(run) == 70.0, "of a cell of an older version"


def test_what_is_measured_is_reported_where_data_of_another_row_are_missing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(here, lambda table: table["scales"]["tiny"]["points"].update({"": {"data": "nowhere"}}))
    measured(here, ["none"])
    assert reproduce() == EXIT_USAGE
    captured = capsys.readouterr()
    assert "| None | 2.5 | 2.5 |" in captured.out
    said(captured.err, "error: nowhere is missing")
    run = CellRun("xl", "", 0, Path("out"))  # the command may name other data
    monkeypatch.setenv("DATA", "shards")
    for own in ("data.path=shards", "data.path='shards'", "data.path=${oc.env:DATA}", "data={path: shards}"):
        build(StudyCall(load_study("two"), Path("out"), [run], 1, [own], StopSignal([])), run, print)
    for split in ("train", "tset"):
        (here / "nowhere" / split).mkdir(parents=True)
        (here / "nowhere" / split / "index.json").touch()
    with refused(UnusableError, "nowhere", "tset"):  # before anything is trained
        reproduce()


def test_without_mlflow_a_table_is_made_all_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(here, ["none", "xl"])
    uri = f"http://127.0.0.1:{free_port()}"
    assert reproduce(f"tracking.uri={uri}", "tracking.mlflow=true") == EXIT_DONE
    captured = capsys.readouterr()
    assert "MLflow has no run for the table: MlflowException: " in captured.err
    assert "| XL | 2.5 |" in captured.out
    job = StudyCall(load_study("two"), Path("out"), [], 1, [], StopSignal([]))
    parent = ParentRun(tracked.config_for("sqlite:///store.db").tracking, Path("out"), name="two", tags={})
    close_parent(parent, job, [Path("out/gone.md")], "FINISHED")
    assert "MLflow did not receive the table: FileNotFoundError: " in capsys.readouterr().err


def test_a_deleted_run_of_a_study_is_made_again_with_everything(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the study runs, and between two calls; its trainings move into the new one."""
    tracking, table = tracked.config_for(sqlite_uri).tracking, tmp_path / "table.md"
    table.write_text("| a table |")

    def call() -> ParentRun:
        return ParentRun(tracking, tmp_path, name="two", tags={"dist_mem.table": "two"})

    first = call()
    child = tracked.job(tracked.config_for(sqlite_uri), tmp_path / "xl-seed0", {1: 1.0})
    for parent in (first, call()):
        assert parent.run_id == first.run_id
    client.delete_run(first.run_id)
    parent.close({"xl/test": 2.0}, [table], [tmp_path / "xl-seed0", tmp_path / "absent"], status="FINISHED")
    run = client.get_run(parent.run_id)
    assert first.run_id != parent.run_id == call().run_id
    assert (run.info.status, run.data.metrics, run.data.tags["dist_mem.table"]) == ("FINISHED", {"xl/test": 2.0}, "two")
    assert [file.path for file in client.list_artifacts(parent.run_id)] == ["table.md"]
    assert client.get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id
    assert f"has no run {first.run_id}: creating a new one" in capsys.readouterr().err


def test_a_study_is_refused_before_it_trains_what_a_training_is_refused(
    here: Path, sqlite_uri: str, client: Any
) -> None:
    """A deleted experiment, and the run of another log."""
    measured(here, ["none", "xl"])
    client.delete_experiment(client.create_experiment("a deleted one"))
    given = (f"tracking.uri={sqlite_uri}", "tracking.mlflow=true")
    with refused(UnusableError, "a deleted one", "mlflow experiments restore"):
        run_study(
            StudyRequest("two", "reproduce", out=here / "out", extra=[*given, "tracking.experiment=a deleted one"])
        )
    (here / "out" / "mlflow_run_id").write_text(
        tracked.job(tracked.config_for(sqlite_uri), here / "another", {1: 1.0}).run_id or ""
    )
    with refused(UnusableError, here / "out" / "mlflow_run_id"):
        run_study(StudyRequest("two", "reproduce", out=here / "out", extra=given))


def test_one_call_at_a_time_works_in_a_folder(here: Path) -> None:
    measured(here, ["none", "xl"])
    with hold_folder(here / "out", "the test"), pytest.raises(UnusableError, match=r"out: .*process \d+ on "):
        reproduce()
    assert reproduce() == EXIT_DONE


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


def test_a_signal_reaches_the_ranks_before_the_command_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    stop = StopSignal([])
    job = StudyCall(load(tmp_path), tmp_path, [], 2, [], stop, environment={"PYTHONPATH": str(tmp_path)})

    def tell() -> None:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "both ranks")
        stop.received = "SIGTERM"

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(StudyStoppedError):
        job.command([*launcher(2)[:-1], "a_rank"], "train")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert launcher(2) != launcher(2)  # a port of its own, so that two tables do not meet


def test_a_training_reports_the_newest_line_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that trained for minutes printed nothing, not even that DeepSpeed was being compiled."""
    monkeypatch.setattr("dist_mem.studies.study_call._PROGRESS", 0.5)
    job, lines = StudyCall(load(tmp_path), tmp_path, [], 1, [], StopSignal([])), list[str]()
    begun = "print('compiling', flush=True); time.sleep(2); print('step 1\\nstep', end='', flush=True)"
    job.command([sys.executable, "-c", f"import time; {begun}; time.sleep(2)"], "train", progress=lines.append)
    assert lines == ["compiling", "step 1"]


def test_a_setpriv_that_knows_no_death_signal_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of RHEL 8 (util-linux 2.32) and of busybox: every command of a table would end with its usage."""
    (tmp_path / "setpriv").write_text("#!/bin/sh\necho \"setpriv: unrecognized option '$1'\" >&2\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert die_with_parent(["train"]) == ["train"]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (util-linux)")
def test_a_training_saves_when_the_command_is_killed(tmp_path: Path) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    starts = f"import subprocess; subprocess.run({die_with_parent([sys.executable, 'a_rank.py'])!r})"
    table = subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path, env={**os.environ, "RANK": "0"})
    wait_until(lambda: (tmp_path / "up-0").exists(), "the training")
    table.kill()
    table.wait()
    wait_until(lambda: (tmp_path / "saved-0").exists(), "what it saves")


def test_runs_at_one_time_share_the_cores_and_no_gpu() -> None:
    assert places(1, 4, num_cores=8, gpus=list("0123")) == [{}], "one alone has all, as without a sweep"
    assert places(2, 2, num_cores=9, gpus=[]) == [{"OMP_NUM_THREADS": "2"}] * 2
    found = places(2, 2, num_cores=2, gpus=["2", "3", "GPU-a", "GPU-b", "9"])
    assert [place["CUDA_VISIBLE_DEVICES"] for place in found] == ["2,3", "GPU-a,GPU-b"]
    with refused(UnusableError, "--jobs 3"):
        places(3, 2, num_cores=2, gpus=list("01234"))


def test_cores_are_those_that_the_command_may_use(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As given by taskset, or by a job of Slurm."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 7)))
    job = StudyCall(load_study("two"), Path("out"), [], 1, [], StopSignal([]))
    found = places_of(job, StudyRequest("two", "sweep", jobs=2))
    assert [place["OMP_NUM_THREADS"] for place in found] == ["2", "2"]


def test_the_end_is_that_of_the_last_place() -> None:
    assert finish_seconds([5.0, 3.0, 4.0, 1.0], 2) == 7.0
    run = CellRun("none", "", 0, Path())
    *_, last = report([Estimate(run, 10, 2_000_000, 0.5, 5400.0)] * 2, num_places=1, ranks=4, device="GPU")
    assert "2 runs: 4 M tokens, 12 GPU-hours; with --jobs 1 about 3:00:00, until " in last


DIES_AT_FIRST = "import os, sys; n = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_RDWR); os.write(n, b'x')"
DIES_AT_FIRST += "; sys.exit(0 if os.fstat(n).st_size > int(sys.argv[2]) else int(sys.argv[3]))"


def test_a_run_that_died_is_started_again_and_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = load(tmp_path, SWEEP)
    job = StudyCall(study, tmp_path, all_runs(study, tmp_path), 1, [], StopSignal([]))
    first, second, third, fourth = (run.row for run in job.runs)
    codes = {first: (2, 1), second: (99, 137), third: (99, 2)}
    full = all_runs(study, tmp_path, [5], [first])

    def step(job: StudyCall, item: CellRun, tell: Callable[[str], None], place: Place) -> None:
        if item in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        times, code = codes.get(item.row, (0, 0))
        job.command([sys.executable, "-c", DIES_AT_FIRST, str(job.out / item.row), str(times), str(code)], item.name)

    errors = for_each_run(job, [*full, *job.runs], [{}, {}], partial(step, job), restarts=2)
    assert [error.errno for error in errors if isinstance(error, OSError)] == [errno.ENOSPC]
    assert [error.code for error in errors if isinstance(error, CommandError)] == [137, 2]
    starts = {run.row: (job.out / run.row).stat().st_size for run in job.runs}
    assert starts == {first: 3, second: 3, third: 1, fourth: 1}, "wrong input is not started again"
    assert f"{first}-seed0: ended with exit code 1; it is started again" in capsys.readouterr().out


@pytest.mark.timeout(600)
def test_trials_save_and_track_like_the_runs_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    """A sweep of 250 steps took 1:10 and not 0:55, because its trials had neither checkpoints nor MLflow."""
    data = build_books(tmp_path)
    settings = {"train": {"steps": 60}, "tracking": {"mlflow": True, "uri": "sqlite:///store.db"}}
    write_config(tmp_path / "job.yaml", data, tmp_path / "unused", settings)
    write_study(tmp_path, SWEEP, grid={"memory.kind": ["none"]}, columns=DEV, data=str(data))
    before = {path.name for path in tmp_path.iterdir()}
    out = tmp_path / "out"
    done(tmp_path, "sweep", "one.yaml", "--estimate", "--out", str(out))
    (kept,) = (out / "estimates").glob("*.json")
    assert json.loads(kept.read_text(encoding="utf-8"))["saving"] > 0.0
    log = "".join(path.read_text(encoding="utf-8") for path in (out / "logs").iterdir())
    assert "estimates/mlflow/store.db" in log, "it was tracked"
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}
    assert [path.name for path in (out / "estimates").rglob("*") if path.is_file()] == [kept.name]
    times = kept.read_text(encoding="utf-8")
    done(tmp_path, "sweep", "one.yaml", "--estimate", "--out", str(out))
    assert kept.read_text(encoding="utf-8") == times, "kept while nothing changes"
    write_study(
        tmp_path,
        SWEEP,
        grid={"memory.kind": ["none"]},
        columns=DEV,
        data=str(data),
        train=["job.yaml", "model.d_model=48"],
    )
    done(tmp_path, "sweep", "one.yaml", "--estimate", "--out", str(out))
    assert kept.read_text(encoding="utf-8") != times, "the row has changed"


def test_a_trial_makes_the_evaluations_of_a_short_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials evaluated after 20 steps, and a training of 16 steps with three evaluations was said to have none."""
    given = list[str]()

    def note(*_: object, extra: list[str], **__: object) -> list[str]:
        given.extend(extra)
        return []

    parts = {"goodput/seconds": 100.0, "goodput/evaluation": 0.6, "goodput/saving": 0.0}
    points = [Point(step, 0.0, {"step_seconds": 1.0, **parts}) for step in (5, 10, 15, 16)]
    config = load_config(["train.steps=16", "eval.every=5", "checkpoint.every=30"])
    for name, function in {
        "build": lambda *_: None,
        "_config": lambda *_: config,
        "columns_left": lambda *_: {},
        "read_points": lambda _: points,
        "train_command": note,
    }.items():
        monkeypatch.setattr(f"dist_mem.studies.estimate.{name}", function)
    monkeypatch.setattr(StudyCall, "command", lambda *_, **__: EXIT_REQUEUE)
    study = load(tmp_path)
    item = all_runs(study, tmp_path)[0]
    replace(item, out=tmp_path / "estimates").directory.mkdir(parents=True)
    monkeypatch.setattr("dist_mem.studies.estimate.shutil.rmtree", lambda *_, **__: None)
    time_row(StudyCall(study, tmp_path, [item], 1, [], StopSignal([])), [], 1, item, print, {})
    assert given == ["tracking.every=5", "eval.every=5", "checkpoint.every=20"]
    (kept,) = (tmp_path / "estimates").glob("*.json")
    assert json.loads(kept.read_text(encoding="utf-8"))["evaluation"] == pytest.approx(20.0)


def test_a_trial_is_that_of_all_seeds_and_one_that_diverges_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was made again once the first seed had finished; a row that diverges was the end of the whole study."""
    study = load_study(write_small_study(tmp_path, monkeypatch, rows={"wild": ["optimizer.lr=1e30"]}))
    runs = all_runs(study, tmp_path, [0, 1])
    job = StudyCall(study, tmp_path, runs, 1, [], StopSignal([]))
    assert len({trial_settings(job, run, 1) for run in runs}) == 1
    monkeypatch.setattr(StudyCall, "command", lambda *_, also, **__: also[-1])
    assert estimate(job, [{}]) == ([], [])
    assert "wild-seed0: diverges" in capsys.readouterr().out
    for code, error in ((EXIT_USAGE, UnusableError), (1, UnfitError)):

        def fail(*_: object, code: int = code, **__: object) -> int:
            raise CommandError("train", code)

        monkeypatch.setattr(StudyCall, "command", fail)
        with refused(error, "train", "--no-estimate"):
            estimate_study(job, [{}])


def test_an_estimate_of_tuned_rows_is_of_their_trials_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all trials finished, the rows had no tuned settings, and their own finished cells were refused."""
    tune = {"grid": {"optimizer.lr": [0.001, 0.004]}, "most": 2}
    write_small_study(tmp_path, monkeypatch, rows=ONE_ROW, tune=tune)
    estimated = list[list[str]]()
    monkeypatch.setattr(
        "dist_mem.studies.run_study._estimate", lambda job, places: estimated.append([run.row for run in job.runs])
    )
    asked = StudyRequest("one.yaml", "sweep", out=Path("out"), estimate=True, run=False)
    assert run_study(asked) == EXIT_DONE
    trials = ["kindnone lr 0.001", "kindnone lr 0.004"]
    assert estimated == [trials]
    for value, trial in enumerate(trials):
        for column in ("tuned", "tuned on validation"):
            keep_result(CellRun(trial, "", 1, Path("out") / "tuning"), column, {"value": 5.0 - value, "step": 1})
    keep_result(CellRun("kindnone", "", 0, Path("out")), "dev", {"value": 4.0, "step": 1})
    assert run_study(replace(asked, estimate=False, run=True)) == EXIT_DONE
    assert run_study(asked) == EXIT_DONE
    assert estimated == [trials, ["kindnone"]]


def test_trials_that_slurm_has_trained_are_measured_before_the_rows_are_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were submitted again, by every further call, and one that diverged for ever; no row was ever trained.

    Then some steps of each were trained where it was called, for an estimate that no job needs.
    """
    tune = {"grid": {"optimizer.lr": [0.001, 0.004, 0.5]}, "most": 3}
    write_small_study(tmp_path, monkeypatch, rows=ONE_ROW, tune=tune)
    submitted, measured = list[list[str]](), list[str]()

    def submit(runs: Path, launch: LaunchConfig, **options: Any) -> int:
        submitted.append(runs.read_text(encoding="utf-8").splitlines())
        return EXIT_DONE

    def measure(job: StudyCall, item: CellRun, *more: Any) -> None:
        measured.append(item.row)
        for column in columns_left(job, item):
            keep_result(item, column, {"value": 5.0 + len(item.row), "step": 1})

    monkeypatch.setattr("dist_mem.studies.run_study.submit_array", submit)
    monkeypatch.setattr("dist_mem.studies.run_study.run_one", measure)
    monkeypatch.setattr("dist_mem.studies.run_study._estimate", lambda *_: pytest.fail("trains"))
    launch = load_config(["job.yaml"]).launch
    asked = StudyRequest("one.yaml", "sweep", out=Path("out"), launch=launch, estimate=True)

    def trained(out: Path, *rows: str, seed: int) -> None:
        for run in (CellRun(row, "", seed, out).directory for row in rows):
            run.mkdir(parents=True)
            mark_finished(run, 1, load_config(["job.yaml"]).train)

    def diverged(row: str) -> None:
        code = CellRun(row, "", 1, Path("out") / "tuning").directory / "slurm" / "7" / "exit_code"
        code.parent.mkdir(parents=True)
        code.write_text(f"{EXIT_DIVERGED}\n")

    trials = ["kindnone lr 0.001", "kindnone lr 0.004", "kindnone lr 0.5"]
    assert run_study(asked) == EXIT_DONE
    trained(Path("out") / "tuning", trials[0], seed=1)
    diverged(trials[2])
    assert run_study(asked) == EXIT_DONE
    assert ([len(runs) for runs in submitted], measured) == ([3, 1], [])
    trained(Path("out") / "tuning", trials[1], seed=1)
    diverged(trials[1])  # and was then trained to its end elsewhere
    assert run_study(asked) == EXIT_DONE
    assert ([len(runs) for runs in submitted], measured) == ([3, 1, 1], trials)
    assert "optimizer.lr=0.001" in submitted[-1][0], "the row, at its best rate"
    trained(Path("out"), "kindnone", seed=0)
    with refused(UnusableError, "out", "--no-estimate"):
        run_study(asked)
    assert len(submitted) == 3


def test_a_grid_does_not_grow_beyond_what_its_key_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row was ever trained: the call ended with the refusal of a value that nobody had written."""
    write_small_study(tmp_path, monkeypatch, rows=ONE_ROW, tune={"grid": {"model.dropout": [0.3, 0.6]}})
    for value, loss in ((0.3, 5.0), (0.6, 4.0)):
        for column in ("tuned", "tuned on validation"):
            keep_result(
                CellRun(f"kindnone dropout {value}", "", 1, Path("out") / "tuning"), column, {"value": loss, "step": 1}
            )
    keep_result(CellRun("kindnone", "", 0, Path("out")), "dev", {"value": 4.0, "step": 1})
    assert run_study(StudyRequest("one.yaml", "sweep", out=Path("out"), estimate=False)) == EXIT_DONE
    printed = capsys.readouterr().out
    said(printed, "model.dropout=1.2", "is not tried")
    assert "dropout 0.6, chosen on validation" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.timeout(900)
def test_a_sweep_says_what_it_takes_and_survives_a_killed_row(tmp_path: Path) -> None:
    data = build_books(tmp_path)
    steps = {"train": {"steps": 60}, "checkpoint": {"every": 10}}
    write_config(tmp_path / "job.yaml", data, tmp_path / "unused", steps)
    write_study(tmp_path, SWEEP, grid={"memory.kind": ["none", "causal"]}, columns=DEV, data=str(data))

    out = tmp_path / "out"  # as a whole path, it is that of this test alone
    process = start(tmp_path, "sweep", "one.yaml", "--jobs", "2", "--out", str(out))
    run = out / "runs" / "kindnone-seed0"
    wait_until(lambda: process.poll() is not None or len(logged_steps(run)) > 15, "some steps", seconds=400)
    found = subprocess.run(["pkill", "-KILL", "-f", f"train.*run_dir={run}"], check=False)
    assert found.returncode == 0, "a training to kill"
    code, text, errors = finish(process)
    assert code == EXIT_DONE, errors
    assert "2 runs: " in text
    assert "tokens, " in text
    assert f"kindnone-seed0: ended with exit code {-signal.SIGKILL}; it is started again" in text
    assert "the estimate was" in text
    assert (out / "table.png").is_file()
    assert [line["ended"] for line in lines_of(out)] == ["evaluated", "evaluated"]
    assert all(logged_steps(out / "runs" / f"kind{kind}-seed0")[-1] == 60 for kind in ("none", "causal"))
    assert "already done" in done(tmp_path, "sweep", "one.yaml", "--jobs", "2", "--out", str(out))


@pytest.mark.timeout(1200)
def test_an_arena_that_was_stopped_goes_on_and_its_cells_can_be_repeated(tmp_path: Path) -> None:
    """A memory from outside the package takes part like any other."""
    data = build_books(tmp_path)
    write_config(
        tmp_path / "job.yaml", data, tmp_path / "unused", {"checkpoint": {"every": 10}, "train": {"threads": 1}}
    )
    rows = {"none": ["memory.kind=none"], "outside": [f"memory.kind={ROOT}/examples/averages.py:Averages"]}
    budget = {"tokens": 60 * load_config([str(tmp_path / "job.yaml")]).train.global_batch_size * 16}
    rates = {"optimizer.lr": [0.001, 0.002]}
    tune = {"rows": {"outside": rates}, "budget": {"tokens": budget["tokens"] // 6}, "most": 2}
    arena = {"train": ["job.yaml"], "rows": rows, "columns": DEV, "data": str(data), "budget": budget, "tune": tune}
    write_study(tmp_path, arena, seeds=[0])

    assert "outside" in done(tmp_path, "arena", "one.yaml", "--plan", "--out", "out")
    command = ("arena", "one.yaml", "eval.allow_code=true", "--cells", "cells", "--jobs", "2", "--no-estimate", "--out")
    process = start(tmp_path, *command, "stopped")
    kept = tmp_path / "cells"
    wait_until(lambda: process.poll() is not None or any(kept.glob("*.json")), "a finished cell", seconds=400)
    process.send_signal(signal.SIGTERM)  # to the command alone, which passes it on to its trainings
    assert finish(process)[0] == EXIT_REQUEUE
    text = done(tmp_path, *command, "out")
    assert "taken over from cells" in text
    assert len(list(kept.glob("*.json"))) == len(list(kept.glob("tuning/*.json"))) == 2
    assert not any(read_cell(path)["reports"] for path in kept.glob("tuning/*.json"))  # no intervals, so no scores
    assert "chosen on validation (lr 0.001: " in text
    assert "none / memory, 95 %" in text
    assert (tmp_path / "out" / "pareto.png").is_file()
    cells = lines_of(tmp_path / "out")
    assert [(cell["row"], cell["seed"]) for cell in cells] == [(name, "0") for name in rows]
    assert cells[0]["sha256"] != cells[1]["sha256"]
    for part in ("training", "evaluation"):
        words = [word.replace("out/runs/outside-seed0", "by_hand") for word in shlex.split(cells[1][part])]
        done(tmp_path, *words[1:])
    (report,) = (tmp_path / "by_hand" / "evaluations").glob("validation-*.json")
    assert checksum(read_report(report)) == cells[1]["sha256"]

"""`--check` refuses what the run refuses before its first step: every key of the schema with a value it cannot have."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.config import Config
from dist_mem.config.check import block_of, item_schema
from dist_mem.config.keys import Key, keys_of
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from tests.support.jobs import write_config
from tests.support.messages import said


def wrong_value(key: Key) -> str | None:
    """Return the text of a value that a key cannot have; None for a block."""
    metadata = key.metadata
    if block_of(key.schema) is not None or key.schema is Any:
        return None
    if metadata.is_place or metadata.in_path:
        text = "'~nosuchuser/x'" if metadata.is_place else ".."
    elif metadata.choices:
        text = "nosuchchoice"
    elif (least := metadata.at_least if metadata.at_least is not None else metadata.above) is not None:
        text = f"{least - 1}"
    else:
        text = "???"
    return f"[{text}]" if item_schema(key.schema) is not None else text


WRONG = {
    name.replace("[]", "[0]"): wrong
    for name, key in keys_of(Config).items()
    if "[]" not in name and (wrong := wrong_value(key)) is not None
}
CHECKS = {
    "train": "train job.yaml {} --check",
    "launch": "launch job.yaml launch.gpus_per_node=0 {} --dry-run",
    "sweep": "sweep one.yaml {} --check",
    "arena": "arena equal.yaml {} --check",
    "reproduce": "reproduce one.yaml {} --check",
    "config": "config job.yaml {}",
}


@pytest.fixture
def folder(tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a configuration and two studies; commands start in it."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "job.yaml", books, tmp_path / "run", {"train": {"steps": 2}})
    study = {"train": ["job.yaml"], "rows": {"a": ["memory.kind=none"], "b": []}, "data": str(books)}
    column = {"a": {"metric": "accuracy", "split": "validation"}}
    write_study(tmp_path / "one.yaml", {**study, "columns": column})
    write_study(tmp_path / "equal.yaml", {**study, "columns": column, "budget": {"tokens": 100_000}})
    return tmp_path


def write_study(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def run(command: str, *words: str) -> int:
    return main([part for word in command.split() for part in (words if word == "{}" else (word,))])


@pytest.mark.parametrize("command", CHECKS)
def test_a_check_of_what_can_run_says_so(command: str, folder: Path) -> None:
    assert run(CHECKS[command]) == EXIT_DONE
    assert not (folder / "run").exists() and not (folder / "runs").exists()


# Studies set some keys themselves, and take those of launch with --slurm only.
NOT_OF_A_STUDY = re.compile(r"launch\.|(?:data|train)\.seed$|name$|run_dir$")
TRIED = [
    (command, key)
    for command in CHECKS
    for key in WRONG
    if command not in ("sweep", "arena", "reproduce") or not NOT_OF_A_STUDY.match(key)
]


@pytest.mark.parametrize(("command", "key"), TRIED)
def test_a_check_refuses_a_value_that_a_key_cannot_have(
    command: str, key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(CHECKS[command], f"{key}={WRONG[key]}") == EXIT_USAGE
    error = capsys.readouterr().err
    assert key in error and "Traceback" not in error


REFUSED_BY_THE_DATA = {
    "eval.split": ["eval.every=1", "eval.split=nosplit"],
    "nosplit": ["data.train_split=nosplit"],
    "run_dir": ["run_dir=job.yaml/x"],
    "resume": ["resume=nowhere"],
    "optimizer.groups[0].param_regex": ["optimizer.groups=[{param_regex: nothing}]"],
    "train.global_batch_size": ["train.global_batch_size=400"],
    "schedule.warmup_steps": ["train.steps=null", "train.epochs=1", "schedule.warmup_steps=100000"],
}


@pytest.mark.parametrize("key", REFUSED_BY_THE_DATA)
def test_the_check_of_a_training_opens_what_the_training_opens(
    key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tests/cli/test_refusals.py` starts such trainings."""
    assert run(CHECKS["train"], *REFUSED_BY_THE_DATA[key]) == EXIT_USAGE
    said(capsys.readouterr().err, key.rpartition(".")[2] if key == "eval.split" else key)


@pytest.mark.parametrize("split", ["nosplit", "a\0b", "../train"])
@pytest.mark.parametrize("options", [["--check"], []], ids=["check", "run"])
def test_the_check_of_a_study_knows_the_splits_of_its_columns(
    split: str, options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load((folder / "one.yaml").read_text(encoding="utf-8"))
    content["columns"]["a"]["split"] = split
    write_study(folder / "one.yaml", content)
    assert main(["sweep", "one.yaml", *options]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "one.yaml" in error and repr(split) in error
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("every", "lines"), [("every=null", 1), ("every=5", 0), ("every_minutes=9", 0)])
def test_the_check_says_if_nothing_is_saved_before_the_end(
    every: str, lines: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(CHECKS["train"], f"checkpoint.{every}", *(["checkpoint.every=null"] if "minutes" in every else [])) == 0
    assert " ".join(capsys.readouterr().out.split()).count("saves only at the end") == lines

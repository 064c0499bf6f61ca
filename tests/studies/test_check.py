"""`--check` of a study: the settings of every row, without any data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.studies.study import FOLDER, load_study, study_names, study_path
from tests.support.jobs import build_books, write_config
from tests.support.paths import ROOT

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
    for key in study.trained:
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
    write(
        tmp_path,
        {
            "title": "Mine",
            "source": "nobody",
            "rows": {
                "none": {"name": "None", "paper": {"test": 1.5}, "sizes": {"parameters": 2e6}},
                "xl": {"name": "XL", "paper": {"test": 1.25}},
            },
            "columns": {"test": {"metric": "token_perplexity"}},
            "scales": {
                name: {
                    "about": "Seconds.",
                    "train": ["job.yaml", "tracking.mlflow=false"],
                    "rows": {"none": ["memory.kind=none"], "xl": []},
                    "points": {"": {"data": str(data)}},
                }
                for name in ("tiny", "paper")
            },
        },
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, table: dict[str, Any]) -> None:
    (folder / "my" / "mine.yaml").write_text(yaml.safe_dump(table, sort_keys=False))


def read(folder: Path) -> dict[str, Any]:
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


def test_check_names_every_row_that_cannot_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read(own)
    table["scales"]["paper"]["rows"] = {"none": ["memory.kind=nonesuch"], "xl": ["train.global_batch_size=64"]}
    write(own, table)
    assert main(["reproduce", "my/mine.yaml", "--scale", "paper", "--check"]) == EXIT_USAGE
    errors = capsys.readouterr().err
    assert "row none: " in errors
    assert "nonesuch" in errors
    assert re.search(r"row xl: .*64", errors)  # the data have fewer documents than lanes


def test_a_row_may_have_data_of_its_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read(own)
    table["scales"]["tiny"]["rows"]["none"].append("data.path=elsewhere")
    table["scales"]["tiny"]["points"][""]["made_by"] = "dist-mem data build text"
    write(own, table)
    assert main(["reproduce", "my/mine.yaml", "--check"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "elsewhere: not built yet" in text
    assert "data built by dist-mem data build text" in text
    assert main(["reproduce", "my/mine.yaml", "--rows", "none"]) == EXIT_USAGE
    assert "elsewhere is missing" in capsys.readouterr().err

"""Builders of tasks: the same options give the same bytes, what is finished is kept, another build is refused."""

import signal
from pathlib import Path
from typing import Any

import pytest

from dist_mem.data.shard import read_index, read_tokens
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import task_text
from dist_mem.datasets.split_names import SPLITS
from tests.support.data_builders import BUILDERS, SMALL, build_data
from tests.support.small_builds import contents


def first_documents(folder: Path, number: int) -> list[list[int]]:
    index = read_index(next(folder.rglob("train/index.json")).parent)
    return [read_tokens(index, document).tolist() for document in range(number)]


def test_overwrite_leaves_nothing_of_a_build_of_another_task(tmp_path: Path) -> None:
    for name, options in BUILDERS.items():
        assert build_data(name, "--out", tmp_path, *SMALL, *options, "--lengths", "600", "--overwrite") == 0
        for built in {path.parent.parent for path in tmp_path.rglob("index.json")}:
            assert verify_dataset(built) == [], (name, built)


def test_a_stopped_overwrite_of_several_lengths_builds_each_length_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the command is that comes next; when it has ended, --overwrite replaces all again."""
    built: list[str] = []
    inner, stopped_at = task_text.write_split, 5

    def write_split(documents: Any, split_dir: Path, **options: Any) -> Any:
        built.append(f"{options['recipe'].split(' ')[2]} {split_dir.name}")
        if len(built) == stopped_at:
            raise KeyboardInterrupt
        return inner(documents, split_dir, **options)

    def build(*options: str) -> int:
        return build_data("sorting", "--out", tmp_path, *SMALL, "--lengths", "30", "40", *options, "--overwrite")

    monkeypatch.setattr(task_text, "write_split", write_split)
    splits = [f"{length} {split}" for length in (30, 40) for split in SPLITS]
    assert build() == 128 + signal.SIGINT
    assert build() == 0
    assert built == [*splits[:5], *splits[4:]]
    built.clear()
    assert build() == 128 + signal.SIGINT
    assert build("--seed", "1") == 0
    assert built == [*splits[:5], *splits]
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("name", BUILDERS)
def test_builds_are_repeatable_kept_and_not_mixed_and_a_longer_split_begins_with_a_shorter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    one = tmp_path / "one"

    def build(out: Path, *options: str) -> int:
        return build_data(name, "--out", out, *SMALL, *BUILDERS[name], *options)

    assert build(one) == build(tmp_path / "two") == build(tmp_path / "more", "--train", "12") == 0
    files = contents(one)
    assert contents(tmp_path / "two") == files
    assert first_documents(tmp_path / "more", 8) == first_documents(one, 8)
    next(one.rglob("test/index.json")).unlink()  # as if the build had been killed there
    capsys.readouterr()
    assert build(one) == 0
    assert "train: already built, kept" in capsys.readouterr().out
    assert build(one, "--seed", "1") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert contents(one) == files
    assert build(one, "--seed", "1", "--overwrite") == 0
    assert not [name for name, content in contents(one).items() if name.endswith(".tar") and content == files[name]]
    tokenizer = next(one.rglob("tokenizer.json"))
    tokenizer.write_text(tokenizer.read_text().replace("a", "b"))
    assert build(one, "--seed", "1") == 2

"""Any folder of text as shards: splits by folder, or by a checksum of the names that nothing else moves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.shard import read_index, read_tokens
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.split_names import splits_of
from tests.support.data_builders import build_data
from tests.support.messages import said

SHARES = ("--validation", "0.1", "--test", "0.2")


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"This is {name}.\n", encoding="utf-8")
    return folder


def build(out: Path, *sources: Path, options: tuple[str, ...] = SHARES) -> int:
    given = ["--source", *map(str, sources), "--out", str(out), "--tokenizer", "bytes", *options]
    return build_data("text", *given)


def titles(out: Path) -> dict[str, list[str]]:
    return {
        path.parent.name: [entry.title for entry in read_index(path.parent).documents]
        for path in out.glob("*/index.json")
    }


def test_folders_are_splits_and_names_become_ids(tmp_path: Path) -> None:
    names = ["train/a.txt", "train/deep/b c.txt", "train/d.e.txt", "test/a.txt"]
    assert build(tmp_path / "out", write(tmp_path / "texts", names), options=()) == 0
    assert titles(tmp_path / "out") == {"train": ["a", "d.e", "deep/b c"], "test": ["a"]}
    index = read_index(tmp_path / "out" / "train")
    assert BytesTokenizer().decode(read_tokens(index, 2)) == "This is train/deep/b c.txt.\n"
    assert index.documents[0].id == "a"


def test_names_that_differ_only_in_what_an_id_cannot_hold_stay_apart(tmp_path: Path) -> None:
    names = ["train/a b.txt", "train/a_b.txt", "train/a.b.txt", f"train/{'n' * 100}1.txt", f"train/{'n' * 100}2.txt"]
    assert build(tmp_path / "out", write(tmp_path / "texts", names), options=()) == 0
    assert len({entry.id for entry in read_index(tmp_path / "out" / "train").documents}) == 5


@given(
    num_files=st.integers(1, 60),
    validation=st.integers(0, 50).map(lambda percent: percent / 100),
    test=st.integers(0, 50).map(lambda percent: percent / 100),
    seed=st.none() | st.integers(0, 3),
)
def test_fractions_of_files_are_exact_numbers(num_files: int, validation: float, test: float, seed: int | None) -> None:
    names = [f"book {number}" for number in range(num_files)]
    fractions = {"train": 1 - validation - test, "validation": validation, "test": test}
    dealt = splits_of(names, fractions, seed)
    counts = Counter(dealt.values())
    assert dealt.keys() == set(names)
    for split in ("validation", "test"):
        is_rest = split == "validation" and validation + test == 1  # nothing is for training
        assert is_rest or abs(counts[split] - fractions[split] * num_files) <= 0.5 + 1e-9
    assert dealt == splits_of(names[::-1], fractions, seed)
    more = splits_of(names, {**fractions, "train": fractions["train"] / 2, "validation": validation}, seed)
    assert {name for name in names if more[name] == "test"} == {name for name in names if dealt[name] == "test"}


def test_several_sources_and_single_files_are_one_corpus(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", ["a.txt", "b.txt"]), write(tmp_path / "two", ["c.txt"])
    single = write(tmp_path / "three", ["d.txt"]) / "d.txt"
    assert build(tmp_path / "out", one, two, single, options=("--test", "0.5")) == 0
    assert sorted(title for split in titles(tmp_path / "out").values() for title in split) == ["a", "b", "c", "d"]


def test_what_cannot_be_dealt_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, loose = tmp_path / "out", write(tmp_path / "texts", ["a.txt"])
    for sources, options in (
        ([write(tmp_path / "mixed", ["train/a.txt", "b.txt"])], ()),
        ([loose], ("--test", "0.001")),
        ([loose, write(tmp_path / "again", ["a.txt"])], SHARES),
        ([write(tmp_path / "single", ["a.md"]) / "a.md"], SHARES),
        ([write(tmp_path / "other", ["a.md"])], SHARES),
        ([loose], ("--test", "0.5", "--validation", "0.5")),
        ([loose], ("--test", "0.5", "--split-by-hash", "train=1")),
    ):
        assert build(out, *sources, options=options) == 2
        said(capsys.readouterr().err)
    for shares in (("--test", "1"), ("--test", "x")):
        with pytest.raises(SystemExit):
            build(out, loose, options=shares)

"""A corpus of text files, JSON lines or Parquet: equal shards, stable splits, no text in two splits."""

import gzip
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from dist_mem.data.shard import read_index
from dist_mem.data.tar import MAX_ID_LEN
from dist_mem.datasets import builder, corpus_rows
from dist_mem.datasets.corpus import plain_id
from dist_mem.datasets.recipes import text as text_builder
from dist_mem.datasets.split_names import first_occurrences, parse_fractions, split_of, words_digest
from dist_mem.datasets.split_names import splits_of as dealt_names
from dist_mem.errors import UnusableError
from tests.support.data_builders import build_data, build_refused, documents_of, texts_of
from tests.support.messages import refused, said_line
from tests.support.small_builds import contents

Texts = dict[str, str]  # id -> text
TEXTS = {f"d{number:02d}": f"The {number}th text,\nin {number + 2} words.\n" * (number % 5) for number in range(12)}
SEED = 11  # the checksums of `TEXTS` fall into exact numbers, so that files are dealt as rows are
HALVES = ("--split-by-hash", "train=0.5,validation=0.25,test=0.25", "--split-seed", str(SEED))


def json_lines(texts: Texts) -> bytes:
    return b"".join(json.dumps({"id": name, "text": text}).encode() + b"\n" for name, text in texts.items())


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_form(form: str, folder: Path, texts: Texts = TEXTS) -> Path:
    """Write a corpus in one of the forms; return its folder."""
    folder.mkdir(parents=True)
    if form == "txt":
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")
    elif form == "jsonl":
        (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(texts).replace(b"\n", b"\n\n"))
    elif form == "jsonl.gz":
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(json_lines(texts)))
    elif form == "jsonl.zst":  # of two frames, as tools that append write it
        lines = json_lines(texts)
        (folder / "rows.jsonl.zst").write_bytes(zstd(lines[:100]) + zstd(lines[100:]))
    else:
        others = {"other": [None] * len(texts), "vector": [[0.5]] * len(texts)}  # no obstacle, as they are not read
        table = pyarrow.table({"text": list(texts.values()), **others, "id": list(texts)})
        parquet.write_table(table, folder / "rows.parquet", row_group_size=5)
    return folder


def build(out: Path, source: Path, *options: str) -> int:
    return build_data("text", "--source", source, "--out", out, "--tokenizer", "bytes", *options)


def splits_of(out: Path) -> dict[str, str]:
    """The split of each document, by its title."""
    return {
        entry.title: path.parent.name
        for path in sorted(out.glob("*/index.json"))
        for entry in read_index(path.parent).documents
    }


def dealt(*arguments: Path | str) -> dict[str, str]:
    """The same without a build, of sources and options."""
    splits = texts_of("--source", *arguments)
    return {document.title: split for split, documents in splits.items() for document in documents}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    assert build(folder / "out", write_form("txt", folder / "txt"), *HALVES) == 0
    return contents(folder / "out")


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_form_of_the_same_texts_gives_the_same_bytes(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also when several processes read the rows of a file that can be read only from its start."""
    workers = {"jsonl.gz": "2"}.get(form, "1")
    monkeypatch.setattr(text_builder, "build_dataset", partial(builder.build_dataset, piece_bytes=1))
    assert build(tmp_path / "out", write_form(form, tmp_path / "corpus"), *HALVES, "--workers", workers) == 0
    assert contents(tmp_path / "out") == expected


def test_splits_of_files_of_rows_are_kept(tmp_path: Path) -> None:
    files, hub = tmp_path / "files", tmp_path / "hub"
    names = list(TEXTS)
    files.mkdir()
    (files / "train-00000-of-00001.jsonl").write_bytes(json_lines({name: TEXTS[name] for name in names[:8]}))
    (files / "test.jsonl").write_bytes(json_lines({name: TEXTS[name] for name in names[8:]}))
    shutil.copytree(files, hub / "en" / "data")
    for source in (files, hub / "en"):
        assert dealt(source) == {name: "train" if name in names[:8] else "test" for name in names}


def test_the_split_of_a_document_depends_on_its_id_alone(tmp_path: Path) -> None:
    """Neither on the order of the rows, nor on the file, nor on documents that are added; only on the seed."""
    many = {f"https://host/{number}": f"Text {number}." for number in range(200)}
    some = dict(reversed(list(many.items())[:60]))
    whole = dealt(write_form("jsonl.gz", tmp_path / "a", many), *HALVES)
    assert dealt(write_form("parquet", tmp_path / "b", some), *HALVES).items() <= whole.items()
    fractions = parse_fractions(HALVES[1])
    assert whole == {name: split_of(name, fractions, seed=SEED) for name in many}
    assert whole != {name: split_of(name, fractions, seed=1) for name in many}


def test_a_larger_fraction_moves_documents_out_of_train_only() -> None:
    names = [str(number) for number in range(2000)]
    smaller, larger = {"train": 0.8, "validation": 0.1, "test": 0.1}, {"train": 0.7, "validation": 0.2, "test": 0.1}
    moves = Counter((split_of(name, smaller), split_of(name, larger)) for name in names)
    assert {move for move in moves if move[0] != move[1]} == {("train", "validation")}
    assert moves["test", "test"] == pytest.approx(200, rel=0.2)


def test_a_corpus_without_splits_is_dealt_out_as_the_help_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {str(number): f"Text {number}." for number in range(600)}
    splits = dealt(write_form("jsonl", tmp_path / "a", many))
    assert "documents are dealt out by their ids, train=0.98,validation=0.01,test=0.01" in capsys.readouterr().out
    assert list(splits.values()).count("train") == pytest.approx(588, abs=10)


def test_rows_without_id_are_named_by_file_and_number(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"body": "one", "key": 7}\n{"body": "two", "id": null, "key": "x"}\n')
    fields = ("--text-field", "body", "--split-by-hash", "train=1")
    assert list(dealt(source, *fields)) == ["rows.jsonl:1", "rows.jsonl:2"]
    assert list(dealt(source, *fields, "--id-field", "key")) == ["7", "x"]


def test_texts_in_two_splits_are_refused_or_dropped_and_repeats_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path("source")
    source.mkdir()
    (source / "train.jsonl").write_bytes(json_lines({"a": "The same", "b": "another", "c": "the end", "d": "another"}))
    (source / "test.jsonl").write_bytes(json_lines({"e": "the  same\n", "f": "The\r\nsame", "g": "third", "h": ""}))
    places = "'f' in test (source/test.jsonl, line 2)", "'a' in train (source/train.jsonl, line 1)"
    refuse(tmp_path, source, named=("1 of 4 texts of test", *places, "--drop-duplicates"))
    assert build(tmp_path / "out", source, "--drop-duplicates") == 0
    reported = capsys.readouterr().out
    said_line(reported, "test: 1 of 4 documents")
    said_line(reported, "train: 1 of 4 documents")
    assert "".join(splits_of(tmp_path / "out")) == "eghabcd"


def test_first_occurrences_equal_those_of_a_dictionary() -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    words = [[str(word) for word in draw.integers(0, 40, size=size)] for size in (50, 0, 70)]
    words[2][3] = words[0][2] = ""
    seen: dict[str, tuple[int, int]] = {}
    for split, firsts in enumerate(first_occurrences([b"".join(map(words_digest, texts)) for texts in words])):
        assert len(firsts) == len(words[split])
        for place, word in enumerate(words[split]):
            assert tuple(firsts[place]) == (seen.setdefault(word, (split, place)) if word else (split, place))


GOOD = b'{"id": "a", "text": "A text."}\n'
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("r.jsonl", GOOD + b'{"text": \n', ", line 2 "),
    "nested too deep": ("r.jsonl", GOOD + b"[" * 100_000 + b"\n", ", line 2 "),
    "no object": ("r.jsonl", GOOD + b"[1]\n", ", line 2 "),
    "not UTF-8": ("r.jsonl.gz", gzip.compress(GOOD + b"\n\xe9\n"), ", line 3 "),
    "no text": ("r.jsonl", GOOD + b'{"body": "x"}\n', ", line 2 has no field 'text'"),
    "null": ("r.jsonl", b'{"text": null}\n', ", line 1: field 'text'"),
    "bad id": ("r.jsonl", b'{"text": "x", "id": 1.5}\n', ", line 1: field 'id'"),
    "half a surrogate": ("r.jsonl", b'{"text": "\\ud800"}\n', ", line 1: "),
    "id twice": ("r.jsonl", GOOD + GOOD, ", line 1 and r.jsonl, line 2: document id 'a'"),
    "gzip cut": ("r.jsonl.gz", gzip.compress(GOOD)[:-9], ", line 2 or later: the file is damaged"),
    "zstd cut": ("r.jsonl.zst", zstd(GOOD)[:-3], ", line 1 or later: "),
    "no parquet": ("r.parquet", b"garbage", ", row 1 or later: "),
    "no rows": ("r.jsonl", b"\n", ": its files have no rows"),
}


def refuse(tmp_path: Path, source: Path, *options: str, named: tuple[object, ...]) -> None:
    build_refused("text", "--source", source, "--out", tmp_path / "out", *options, named=named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, place = DAMAGED[fault]
    Path(name).write_bytes(content)
    refuse(tmp_path, Path(name), "--split-by-hash", "train=1", named=(f"{name}{place}",))


@pytest.mark.parametrize(
    ("fractions", "named"),
    [
        ("train=0.9,test=0.2", "add up to 1.1"),
        ("train=0.9,dev=0.1", "'dev=0.1' in 'train=0.9,dev=0.1'"),
        ("train=1,train=0", "'train=0'"),
        ("train=nan", "'train=nan'"),
    ],
)
def test_fractions_are_parts_of_one(fractions: str, named: str) -> None:
    with refused(UnusableError, named):
        parse_fractions(fractions)


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_mem.runtime.extras.find_spec", lambda name: None if name == "pyarrow" else name)
    source = write_form("parquet", tmp_path / "corpus")
    refuse(tmp_path, source, named=("pyarrow", "rows.parquet", "'dist-mem[data]'"))


class StoppedError(Exception):
    """A stop in the middle of a build."""


def test_a_stopped_build_of_rows_goes_on_to_the_same_bytes(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finished pieces are used although the rows stand in a file that is read only from its start."""
    source, out = write_form("jsonl.gz", tmp_path / "corpus"), tmp_path / "out"
    monkeypatch.setattr(text_builder, "build_dataset", partial(builder.build_dataset, piece_bytes=1))
    encode, encoded = builder.encode_piece, list[Path]()

    def counting(piece: builder.Piece, stop_after: int) -> int:
        if len(encoded) == stop_after:
            raise StoppedError
        encoded.append(piece.path)
        return encode(piece)

    monkeypatch.setattr(builder, "encode_piece", partial(counting, stop_after=4))
    with pytest.raises(StoppedError):
        build(out, source, *HALVES)
    assert not list(out.glob("*/index.json"))
    monkeypatch.setattr(builder, "encode_piece", partial(counting, stop_after=99))
    assert build(out, source, *HALVES) == 0
    assert len(encoded) == len(set(encoded)) > 4
    assert contents(out) == expected


def test_a_row_that_changes_during_the_build_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    row = corpus_rows.CorpusRow(corpus_rows.RowFile(path, "text", None, 0), 1, 7, corpus_rows.digest_of("A text."))
    assert row.read() == row.read() == "A text."  # a step back opens the file again
    path.write_bytes(GOOD.replace(b"A", b"B"))
    with refused(UnusableError, "rows.jsonl"):
        row.read()
    path.write_bytes(b"")
    with refused(UnusableError, "rows.jsonl has no row 1"):
        row.read()


@pytest.mark.parametrize("form", ["jsonl", "json.gz", "parquet"])
def test_a_field_that_comes_twice_is_refused(tmp_path: Path, form: str) -> None:
    """Whichever is the right one, a reader would take the last or the first in silence."""
    path = tmp_path / f"rows.{form}"
    line = b'{"text": "one", "meta": {"id": 1, "text": ""}, "text": "two"}\n'
    table = pyarrow.Table.from_arrays([pyarrow.array([word]) for word in ("one", "a", "two")], ["text", "b", "text"])
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        path.write_bytes(gzip.compress(line) if form == "json.gz" else line)
    refuse(tmp_path, path, "--split-by-hash", "train=1", named=(path, "2 fields 'text'", "--text-field"))
    assert build(tmp_path / "out", path, "--split-by-hash", "train=1", "--text-field", "b") == 2 * ("j" in form)


# Folders of text: splits by folder, or by a checksum of the names that nothing else moves.


SHARES = ("--validation", "0.1", "--test", "0.2")


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"This is {name}.\n", encoding="utf-8")
    return folder


def build_files(out: Path, *sources: Path, options: tuple[str, ...] = SHARES) -> int:
    return build_data("text", "--source", *sources, "--out", out, "--tokenizer", "bytes", *options)


def titles(out: Path) -> dict[str, list[str]]:
    return {
        path.parent.name: [entry.title for entry in read_index(path.parent).documents]
        for path in out.glob("*/index.json")
    }


def test_folders_are_splits_and_names_become_ids(tmp_path: Path) -> None:
    names = ["train/a.txt", "train/deep/b c.txt", "train/d.e.txt", "test/a.txt"]
    assert build_files(tmp_path / "out", write(tmp_path / "texts", names), options=()) == 0
    assert titles(tmp_path / "out") == {"train": ["a", "d.e", "deep/b c"], "test": ["a"]}
    found = documents_of(tmp_path / "out")
    assert found[2].text == "This is train/deep/b c.txt.\n"
    assert found[0].entry.id == "a"


def test_names_that_differ_only_in_what_an_id_cannot_hold_stay_apart(tmp_path: Path) -> None:
    names = ["train/a b.txt", "train/a_b.txt", "train/a.b.txt", f"train/{'n' * 100}1.txt", f"train/{'n' * 100}2.txt"]
    assert build_files(tmp_path / "out", write(tmp_path / "texts", names), options=()) == 0
    assert len({entry.id for entry in read_index(tmp_path / "out" / "train").documents}) == 5


def test_no_two_of_many_titles_without_plain_letters_have_one_id() -> None:
    """32 bits of a checksum gave the first two at the 58,393rd."""
    assert len({plain_id(f"条目{number}") for number in range(100_000)}) == 100_000
    path = "crawl-2024-10/cleaned/part-00000-6f2a9c1e-9d1a-4a3c-8a0b-8b8a0c7d5e11-c000.jsonl"
    a, b = f"{path}:85132", f"{path}:95505"
    assert plain_id(a) != plain_id(b) and len(plain_id(a)) == len(plain_id(b)) == MAX_ID_LEN


@given(
    num_files=st.integers(1, 60),
    validation=st.integers(0, 50).map(lambda percent: percent / 100),
    test=st.integers(0, 50).map(lambda percent: percent / 100),
    seed=st.none() | st.integers(0, 3),
)
def test_fractions_of_files_are_exact_numbers(num_files: int, validation: float, test: float, seed: int | None) -> None:
    names = [f"book {number}" for number in range(num_files)]
    fractions = {"train": 1 - validation - test, "validation": validation, "test": test}
    dealt = dealt_names(names, fractions, seed)
    counts = Counter(dealt.values())
    assert dealt.keys() == set(names)
    for split in ("validation", "test"):
        is_rest = split == "validation" and validation + test == 1  # nothing is for training
        assert is_rest or abs(counts[split] - fractions[split] * num_files) <= 0.5 + 1e-9
    assert dealt == dealt_names(names[::-1], fractions, seed)
    more = dealt_names(names, {**fractions, "train": fractions["train"] / 2, "validation": validation}, seed)
    assert {name for name in names if more[name] == "test"} == {name for name in names if dealt[name] == "test"}


def test_several_sources_and_single_files_are_one_corpus(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", ["a.txt", "b.txt"]), write(tmp_path / "two", ["c.txt"])
    single = write(tmp_path / "three", ["d.txt"]) / "d.txt"
    assert build_files(tmp_path / "out", one, two, single, options=("--test", "0.5")) == 0
    assert sorted(title for split in titles(tmp_path / "out").values() for title in split) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("below", ["", "en/"])
@pytest.mark.parametrize("are_files", [False, True])
def test_what_was_held_out_stays_so_if_its_files_or_folders_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, are_files: bool
) -> None:
    names = {split: [f"{split[:2]}{number}" for number in range(20)] for split in ("train", "test")}
    expected = {name: split for split in names for name in names[split]}
    folders = [write(tmp_path / split / below, [f"{name}.txt" for name in names[split]]) for split in names]
    sources = [path for folder in folders for path in sorted(folder.iterdir())] if are_files else folders
    assert dealt(*sources) == expected
    monkeypatch.chdir(folders[0])
    assert dealt(*(Path(os.path.relpath(source)) for source in sources)) == expected
    train = [source for source in sources if "train" in source.parts]
    assert set(dealt(*train, *SHARES).values()) == {"train", "validation", "test"}  # of one folder, as ever


def test_what_cannot_be_dealt_is_named(tmp_path: Path) -> None:
    out, loose = tmp_path / "out", write(tmp_path / "texts", ["a.txt"])
    for sources, options, named in (
        ([write(tmp_path / "mixed", ["train/a.txt", "b.txt"])], (), "b.txt is in none of the folders"),
        ([loose], ("--test", "0.001"), "1 document cannot be dealt out to train, validation, test"),
        ([two := write(tmp_path / "two", ["a.txt", "b.txt", "c.txt"])], ("--test", "0.001"), "none falls to test"),
        ([two], (*SHARES, "--name", "a/b"), "name is 'a/b'"),
        ([loose, write(tmp_path / "again", ["a.txt"])], SHARES, "have one name, a.txt"),
        ([write(tmp_path / "single", ["a.md"]) / "a.md"], SHARES, "a.md is neither"),
        ([write(tmp_path / "other", ["a.md"])], SHARES, "passed over 1 .md"),
        ([loose], ("--test", "0.5", "--validation", "0.5"), "nothing to train on"),
        ([loose], ("--test", "0.5", "--split-by-hash", "train=1"), "short for --split-by-hash"),
    ):
        build_refused("text", "--source", *sources, "--out", out, *options, named=(named,))
    for shares in (("--test", "1"), ("--test", "x")):
        with pytest.raises(SystemExit):
            build_files(out, loose, options=shares)


@pytest.mark.parametrize("change", [lambda text: normalize("NFD", text), lambda text: text.replace(" ", "\u200b ")])
def test_a_text_that_differs_only_in_what_nobody_sees_is_in_one_split(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    text = "Ein Käfer läuft über die Brücke.\n"
    for split, content in (("train", text), ("test", change(text))):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / f"{split}.txt").write_text(content, encoding="utf-8")
    refuse(tmp_path, tmp_path / "texts", named=("train", "test", "--drop-duplicates"))

"""Files under --source: what is read, passed over, counted or refused, in every builder."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_mem.datasets import gpt2_tokenizer
from dist_mem.datasets.recipes import cmu_dog, pg19
from dist_mem.datasets.task_text import Books
from dist_mem.errors import UnusableError
from tests.support.data_builders import TRAIN, Members, build_data, build_refused, tar_of, texts_of
from tests.support.file_server import FileServer
from tests.support.messages import said, said_line

HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation", "heldout"}
READ = (".txt", ".jsonl", ".ndjson", ".json.gz")
HIDDEN = ("._b1.txt", ".ipynb_checkpoints/b1.txt", ".Trash-1000/files/b.txt", "__MACOSX/._b1.txt", "__MACOSX/b1.txt")
FOLDERS = ["data", "en", "train", "Train", "TEST", "valid", "dev-clean", "held_out", "contest", ".git", "__MACOSX"]
STEMS = ["b1", "b2", "train", "train-00000-of-00001", "test-00000-of-00002", "wiki.valid.raw", "acid_test", "._b1"]
SUFFIXES = [".txt", ".TXT", ".jsonl", ".NDJSON", ".json.gz", ".md", ".txt.utf-8", ".json", ""]
FIX = re.compile("rename|put it|larger fraction|no file of|must be unique")
PATHS = st.tuples(st.lists(st.sampled_from(FOLDERS), max_size=2), st.sampled_from(STEMS), st.sampled_from(SUFFIXES))


def write(folder: Path, name: str) -> None:
    """Write a file whose one document is its name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lower = name.lower()
    row = json.dumps({"text": name}).encode() + b"\n"
    content = gzip.compress(row) if lower.endswith(".gz") else row if lower.endswith(READ[1:]) else name.encode()
    path.write_bytes(content)


def read(source: Path, *options: str) -> tuple[dict[str, str], str]:
    """The split of each document, by its text, and what is printed."""
    with redirect_stdout(io.StringIO()) as printed:
        splits = texts_of("--source", source, *options)
    return {each.text(): split for split, found in splits.items() for each in found}, printed.getvalue()


def is_put_there_by_a_system(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


@given(st.lists(PATHS, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_every_file_is_read_or_counted_and_none_that_its_path_holds_out_is_in_train(
    paths: list[tuple[list[str], str, str]],
) -> None:
    names = {"/".join([*folders, stem + suffix]) for folders, stem, suffix in paths}
    assume(not any(name.startswith(f"{other}/") for name in names for other in names))  # no file is a folder too
    taken = {name for name in names if name.lower().endswith(READ) and not is_put_there_by_a_system(name)}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            write(Path(folder), name)
        try:
            splits, printed = read(Path(folder))
        except UnusableError as error:
            assert FIX.search(str(error)), error
            return
    assert splits.keys() == taken
    for name in taken:
        *parts, file = name.lower().replace("held_out", "heldout").split("/")
        if "train" in parts and file.endswith(".txt"):
            continue  # a word in the title of a text that stands in a folder train
        words = set(re.split("[^a-z]", "/".join([*parts, file])))
        assert splits[name] != "train" or not words & HELD_OUT, name
    others = [name for name in names - taken if not is_put_there_by_a_system(name)]
    counts = [int(number) for number in re.findall(r"(?:over|,) (\d+) (?:\.|without)", printed)]
    assert sum(counts) == len(others)
    assert ("hidden (" in printed) == any(map(is_put_there_by_a_system, names))


def test_files_that_nobody_put_there_are_passed_over_and_counted_in_every_builder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b1.txt", "b2.TXT", *HIDDEN):
        write(tmp_path / "train", name)
        (tmp_path / "json" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "json" / re.sub("(?i)txt$", "json", name)).write_text("{}")
    found = {
        "text": set(read(tmp_path / "train", "--split-by-hash", "train=1")[0]),
        "pg19": {each.text() for each in pg19.read_split(tmp_path / "train", {}, order="id", limit=None)},
        "gpt2_tokenizer": set(gpt2_tokenizer.texts(tmp_path / "train")),
        "books": {path.name for path in Books(tmp_path / "train", ("train",)).paths["train"]},
        "cmu_dog": {path.name.replace(".json", ".txt") for path, _ in cmu_dog.read_folder(tmp_path / "json")},
    }
    for builder, texts in found.items():
        assert {text.lower() for text in texts} == {"b1.txt", "b2.txt"}, builder
    printed = capsys.readouterr().out.replace("json", "txt")  # without that of `read`
    counts = re.findall("passed over 4 hidden .*", printed)
    assert len(counts) == len(found) - 1  # and `read`'s
    for count in counts:
        said(count, ".Trash-1000, ._b1.txt, .ipynb_checkpoints")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to nothing": (lambda folder: (folder / "x.txt").symlink_to("/nowhere"), "x.txt"),
    "link of a folder to nothing": (lambda folder: (folder / "train").symlink_to("/nowhere"), "train"),
    "pipe": (lambda folder: os.mkfifo(folder / "x.txt"), "x.txt"),
    "device": (lambda folder: (folder / "x.txt").symlink_to("/dev/zero"), "x.txt"),
    "folder": (lambda folder: (folder / "x.txt").mkdir(), "x.txt"),
    "link in a circle": (lambda folder: (folder / "again").symlink_to(folder), "again"),
    "not UTF-8": (lambda folder: Path(os.fsdecode(bytes(folder) + b"/caf\xe9.txt")).write_text("x"), r"caf\xe9.txt"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_entry_that_is_no_readable_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "texts", "b1.txt")
    spoil, name = ODD[kind]
    spoil(tmp_path / "texts")
    options = ("--source", tmp_path / "texts", "--out", tmp_path / "out", "--split-by-hash", "train=1")
    build_refused("text", *options, named=(tmp_path / "texts" / name,))
    assert not (tmp_path / "out").exists()


def test_links_to_folders_are_read(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "test/b1.txt")
    write(tmp_path / "texts", "train/b2.txt")
    (tmp_path / "texts" / "test").symlink_to(tmp_path / "elsewhere" / "test")
    assert read(tmp_path / "texts")[0] == {"test/b1.txt": "test", "train/b2.txt": "train"}


def test_several_sources_that_are_named_as_splits_are_these_splits(tmp_path: Path) -> None:
    for name in ("train/b.txt", "dev/b.txt"):
        write(tmp_path, name)
    splits = texts_of("--source", tmp_path / "train", tmp_path / "dev")
    titles = {split: [each.title for each in found] for split, found in splits.items()}
    assert titles == {"train": ["b"], "validation": ["b"]}


@pytest.mark.parametrize(
    ("builder", "names", "options", "named"),
    [
        ("text", ["train/test-0-of-1.jsonl"], [], ("train/test-0-of-1.jsonl", "--split-by-hash")),
        *(
            ("text", ["data/test-0-of-1.jsonl"], [share, "0.1"], ("--validation", "--test", "--split-by-hash"))
            for share in ("--validation", "--test")
        ),
        ("pg19", ["train/1.txt", "valid/2.txt"], [], ("source/valid ",)),
    ],
)
def test_a_name_of_two_splits_and_folders_of_other_names_are_refused(
    tmp_path: Path, builder: str, names: list[str], options: list[str], named: tuple[str, ...]
) -> None:
    for name in names:
        write(tmp_path / "source", name)
    build_refused(builder, "--source", tmp_path / "source", "--out", tmp_path / "out", *options, named=named)


# Tars of other people: the same ids on every run, from a folder and by URL, and damage named.


SHARDS: dict[str, Members] = {
    "000.tar": {"a/0.txt": b"\xef\xbb\xbfOne.\r\n", "a/0.jpg": b"\xff", "1.json": b'{"id": "two", "text": "Two."}'},
    "001.tar": {"0.TXT": b"Three.", "0.json": b'{"id": "three", "text": "its own"}', "._0.txt": b"\0", "7.cls": b"1"},
}
EXPECTED = {"000.tar:a/0": "One.\n", "two": "Two.", "three": "Three."}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, members in SHARDS.items():
        (folder / name).write_bytes(tar_of(members))
    return folder


def read_tars(*sources: str, cache: Path | None = None) -> dict[str, str]:
    """The text of each document by its title."""
    found = texts_of("--source", *sources, *TRAIN, *(("--cache", cache) if cache else ()))
    return {document.title: document.text() for document in found["train"]}


@pytest.mark.servers
def test_the_same_documents_come_from_a_pattern_a_folder_and_a_url(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_tars(f"{shards}/{{000..001}}.tar") == read_tars(str(shards)) == EXPECTED
    said_line(capsys.readouterr().out, f"{shards}: ", "001.tar/._0.txt", "1 .cls")
    with closing(FileServer(tmp_path)) as server:
        for _ in range(2):
            assert read_tars(f"{server.url}/shards/{{000..001}}.tar", cache=tmp_path / "cache") == EXPECTED
        assert set(server.asked.values()) == {3}, "which version, all of it, and again which version"


def test_compressed_tars_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.TAR.GZ").write_bytes(gzip.compress(tar_of(SHARDS["000.tar"])))
    assert read_tars(str(tmp_path)) == {"x.TAR.GZ:a/0": "One.\n", "two": "Two."}


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


WHOLE = tar_of({f"{number}.txt": b"A text.\n" * 100 for number in range(3)})
HEADER = next(512 * k for k in range(1, 20) if WHOLE[512 * k :].startswith(b"1.txt"))
DAMAGED: dict[str, bytes] = {
    "cut in a member": WHOLE[: HEADER + 700],
    "cut in a header": WHOLE[: HEADER + 100],
    "cut between members": WHOLE[:HEADER],
    "flipped header": flipped(WHOLE, HEADER + 3),
    "flipped first header": flipped(WHOLE, 3),
    "joined": WHOLE + WHOLE,
    "no tar": b"<html>",
    "compressed and cut": gzip.compress(WHOLE)[:60],
    "no text": tar_of({"0.jpg": b"\xff"}),
    "twice": tar_of({"0.txt": b"a", "0.TXT": b"b"}),
    "not UTF-8": tar_of({"0.txt": b"\xe9"}),
    "name not UTF-8": tar_of({"caf\udce9.txt": b"a"}),
    "json without text": tar_of({"0.json": b"{}"}),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_tar_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.tar").write_bytes(DAMAGED[fault])
    build_refused("text", "--source", "x.tar", "--out", "out", "--tokenizer", "bytes", *TRAIN, named=("x.tar",))
    assert not Path("out").exists()


def test_every_cut_of_a_tar_is_found(tmp_path: Path) -> None:
    """Up to the end mark; after it, only padding is lost."""
    path, end = tmp_path / "x.tar", len(WHOLE.rstrip(b"\0"))
    for length in range(0, end, 97):
        path.write_bytes(WHOLE[:length])
        assert build_data("text", "--source", str(path), "--out", str(tmp_path / "out"), *TRAIN) == 2, length


def with_entry(name: str, kind: bytes) -> bytes:
    """A tar of a text, an entry of another kind, and a text in a folder that webdataset takes for its own metadata."""
    stream = io.BytesIO(tar_of({"a.txt": b"A.", "__data__/b.txt": b"B."}))
    with tarfile.open(fileobj=stream, mode="a") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "a.txt"
        tar.addfile(entry)
    return stream.getvalue()


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_link_or_pipe_in_a_tar_is_refused_where_a_text_would_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c/0.TXT", "c/1.json"):
        Path("x.tar").write_bytes(with_entry(name, kind))
        build_refused("text", "--source", "x.tar", "--out", "out", *TRAIN, named=("x.tar", name))
    for name in ("c/0.jpg", ".c/0.txt", "c"):
        Path("x.tar").write_bytes(with_entry(name, kind))
        assert read_tars("x.tar") == {"x.tar:a": "A.", "x.tar:__data__/b": "B."}


@pytest.mark.servers
@pytest.mark.parametrize("name", ["009.tar", "x.tar", "000.zip", "pipe:cat {}"])
def test_a_tar_by_url_that_cannot_be_used_is_named(shards: Path, tmp_path: Path, name: str) -> None:
    (shards / "x.tar").write_bytes(WHOLE[:HEADER])
    cache = tmp_path / "cache"
    with closing(FileServer(tmp_path)) as server:
        source = name if ":" in name else f"{server.url}/shards/{name}"
        options = ("--out", tmp_path / "out", "--cache", cache, *TRAIN)
        build_refused("text", "--source", source, *options, named=(name.partition(":")[0],))
    assert not list(cache.rglob("*.tar*"))

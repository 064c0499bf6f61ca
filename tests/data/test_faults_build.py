"""Faults of a builder's texts, place and disk: what is said, with which exit code, and what is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import read_index, read_tokens
from dist_mem.data.tar import MAX_TOKENS, TokenizedDocument, document_arrays
from dist_mem.data.tokenizers.registry import read_tokenizer_metadata
from dist_mem.data.verify import verify_dataset
from tests.support.data_builders import build_data
from tests.support.faults import remount, small_disk
from tests.support.messages import refused, said, said_line
from tests.support.paths import ROOT

TEXT = b"It was the best of times,\nit was the worst of times.\n"
METADATA = "1,One,1900,u\n2,Two,1901,u\n3,Three,1902,u\n"
SCRIPT = ROOT / "shards" / "build.py"


def write_source(source: Path, books: dict[str, bytes], metadata: str = METADATA) -> Path:
    """`books`: "train/1" -> content of the file."""
    for name, content in books.items():
        path = source / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (source / "metadata.csv").write_text(metadata, encoding="utf-8")
    return source


def build(source: Path, out: Path, *options: str) -> int:
    return build_data("pg19", "--source", str(source), "--out", str(out), "--tokenizer", "bytes", *options)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED = {
    "not UTF-8": ({"train/2": b"caf\xe9"}, METADATA, "train/2.txt"),
    "id twice in metadata": ({"train/1": TEXT}, METADATA + "2,Again,1905,u\n", "row 4: id 2"),
    "bad row in metadata": ({"train/1": TEXT}, METADATA + "4,Four\n", "metadata.csv, row 4"),
    "book in two splits": ({"train/1": TEXT, "test/1": b"x"}, METADATA, "document 1 is in train and in test"),
    "unknown book in two splits": ({"train/9": TEXT, "validation/9": TEXT}, METADATA, "validation/9.txt"),
    "id that no tar can carry": ({"train/a.b": TEXT}, METADATA, "document id 'a.b' in split 'train'"),
    "no folder": ({"trian/1": TEXT}, METADATA, "--source"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_sources_that_cannot_be_built_are_refused_and_nothing_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    books, metadata, named = REFUSED[fault]
    assert build(write_source(tmp_path / "source", books, metadata), tmp_path / "out") == 2
    error = capsys.readouterr().err
    said(f"exit code 2: {error}", named)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert {name for name in files_in(tmp_path) if name.startswith("out/")} <= {"out/tokenizer.json"}


def test_numbers_begun_anew_in_each_split_are_other_books(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", {"train/9": TEXT, "test/9": TEXT + TEXT})
    assert build(source, tmp_path / "out") == 0


def test_books_that_are_odd_but_text_are_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The byte order mark goes, line ends become LF; empty, blank and unnamed books stay, and are reported."""
    books = {
        "train/1": TEXT,
        "train/10": b"\xef\xbb\xbf" + TEXT.replace(b"\n", b"\r\n"),
        "train/11": TEXT.replace(b"\n", b"\r"),
        "train/12": b"",
        "train/13": b" \n\t\r\n",
        "train/14": b"a\0b\n",
    }
    source = write_source(tmp_path / "source", books, "\ufeff" + METADATA)
    assert build(source, tmp_path / "out") == 0
    reported = capsys.readouterr().out
    said_line(0, reported, "5 of 6 documents", "metadata.csv")
    said_line(0, reported, "2 of 6 documents", "12, 13")
    index = read_index(tmp_path / "out" / "train")
    assert [entry.title for entry in index.documents] == ["One", "10", "11", "12", "13", "14"]
    texts = [bytes(read_tokens(index, number).astype(np.uint8)) for number in range(6)]
    assert texts == [TEXT, TEXT, TEXT, b"", b" \n\t\n", b"a\0b\n"]
    assert verify_dataset(tmp_path / "out") == []


def test_one_line_of_megabytes_is_text_like_any_other(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(150_000)).encode()  # 1.5 MB
    source = write_source(tmp_path / "source", {"train/1": words, "train/2": b"x" * 2**20, "train/3": TEXT * 100})
    options = ["--tokenizer", "sentencepiece", "--vocab-size", "300"]
    assert build(source, tmp_path / "out", *options) == 0
    sizes = [entry.bytes for entry in read_index(tmp_path / "out" / "train").documents]
    assert sizes == [len(words), 2**20, len(TEXT) * 100]


def test_a_document_beyond_int32_is_refused() -> None:
    tokens = np.broadcast_to(np.uint16(0), (MAX_TOKENS + 1,))  # takes two bytes
    document = TokenizedDocument("1", "One", None, words=1, bytes=1, tokens=tokens)
    with refused(ValueError, "2,147,483,647"):
        document_arrays(document)


@pytest.mark.parametrize(
    ("name", "content"), [("train/index.json", '{"of": "another program"}'), ("tokenizer.json", "no JSON")]
)
def test_what_another_program_left_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    source, out = write_source(tmp_path / "source", {"train/1": TEXT}), tmp_path / "out"
    (out / "train").mkdir(parents=True)
    (out / name).write_text(content)
    (out / "train" / "their_own.tar").write_bytes(b"tar")
    assert build(source, out) == 2
    said(f"exit code 2: {capsys.readouterr().err}", name, "--out", "--overwrite")
    assert (out / name).read_text() == content
    assert build(source, out, "--overwrite") == 0
    assert read_tokenizer_metadata(out)["kind"] == "bytes"
    assert (out / "train" / "their_own.tar").read_bytes() == b"tar"


@pytest.mark.parametrize("builder", ["pg19", "sample"])
def test_a_file_in_the_way_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], builder: str
) -> None:
    source = write_source(tmp_path / "source", {"train/1": TEXT})
    (tmp_path / "out").write_text("a file")
    given = ["--source", str(source)] if builder == "pg19" else ["--size", "tiny"]
    with refused(SystemExit):
        build_data(builder, *given, "--out", tmp_path / "out")
    said_line(2, capsys.readouterr().err, f"'{tmp_path / 'out'}'")


def test_a_full_disk_stops_a_build_that_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A real process; no half-written file is left, and the result is that of a build in one go."""
    books = {f"train/{number}": bytes([97 + number]) * 400_000 for number in range(8)}
    source = write_source(tmp_path / "source", books)
    command = [sys.executable, str(SCRIPT), "pg19", "--source", str(source), "--tokenizer", "bytes", "--out"]
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        stopped = subprocess.run([*command, str(disk / "out")], capture_output=True, text=True, check=False)
        assert stopped.returncode == 1, stopped.stderr
        said(f"exit code 1: {stopped.stderr}", "[Errno 28]", f"'{disk / 'out'}")
        assert stopped.stderr.count("\n") == 1
        assert not list(disk.rglob("*.partial"))
        remount(disk, "size=40m")
        assert build(source, disk / "out") == 0
        assert build(source, tmp_path / "out") == 0
        assert files_in(disk / "out") == files_in(tmp_path / "out")


def test_a_read_only_place_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "source", {"train/1": TEXT})
    with small_disk(tmp_path / "disk", "ro") as disk:
        assert build(source, disk / "out") == 1
        said(f"exit code 1: {capsys.readouterr().err}", "[Errno 30]", f"'{disk / 'out'}")

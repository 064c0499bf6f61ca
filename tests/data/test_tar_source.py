"""Tars of other people as a source: the same ids on every run, from a folder and by URL, and damage named."""

from __future__ import annotations

import gzip
import io
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from dist_mem.cli.datasets import builder_parser
from dist_mem.datasets.recipes import text as text_builder
from tests.support.data_builders import build_data
from tests.support.file_server import FileServer
from tests.support.messages import said, said_line

pytestmark = pytest.mark.servers

Members = dict[str, bytes]
SHARDS: dict[str, Members] = {
    "000.tar": {"a/0.txt": b"\xef\xbb\xbfOne.\r\n", "a/0.jpg": b"\xff", "1.json": b'{"id": "two", "text": "Two."}'},
    "001.tar": {"0.TXT": b"Three.", "0.json": b'{"id": "three", "text": "its own"}', "._0.txt": b"\0", "7.cls": b"1"},
}
EXPECTED = {"000.tar:a/0": "One.\n", "two": "Two.", "three": "Three."}
TRAIN = ("--split-by-hash", "train=1")


def tar_of(members: Members) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, members in SHARDS.items():
        (folder / name).write_bytes(tar_of(members))
    return folder


def read(*sources: str, cache: Path | None = None) -> dict[str, str]:
    """The text of each document by its title."""
    options = ["--source", *sources, "--out", "none", *TRAIN, *(["--cache", str(cache)] if cache else [])]
    documents, _ = text_builder.read_splits(builder_parser("text").parse_args(options))["train"]
    return {document.title: document.text() for document in documents}


def test_the_same_documents_come_from_a_pattern_a_folder_and_a_url(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(f"{shards}/{{000..001}}.tar") == read(str(shards)) == EXPECTED
    said_line(0, capsys.readouterr().out, f"{shards}: ", "001.tar/._0.txt", "1 samples")
    with closing(FileServer(tmp_path)) as server:
        for _ in range(2):
            assert read(f"{server.url}/shards/{{000..001}}.tar", cache=tmp_path / "cache") == EXPECTED
        assert set(server.asked.values()) == {1}


def test_compressed_tars_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.TAR.GZ").write_bytes(gzip.compress(tar_of(SHARDS["000.tar"])))
    assert read(str(tmp_path)) == {"x.TAR.GZ:a/0": "One.\n", "two": "Two."}


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
def test_a_damaged_tar_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.tar").write_bytes(DAMAGED[fault])
    assert build_data("text", "--source", "x.tar", "--out", "out", "--tokenizer", "bytes", *TRAIN) == 2
    said(f"exit code 2: {capsys.readouterr().err}", "x.tar")
    assert not Path("out").exists()


def test_every_cut_of_a_tar_is_found(tmp_path: Path) -> None:
    """Up to the end mark; after it, only padding is lost."""
    path, end = tmp_path / "x.tar", len(WHOLE.rstrip(b"\0"))
    for length in range(0, end, 97):
        path.write_bytes(WHOLE[:length])
        assert build_data("text", "--source", str(path), "--out", str(tmp_path / "out"), *TRAIN) == 2, length


@pytest.mark.parametrize("name", ["009.tar", "x.tar", "000.zip", "pipe:cat {}"])
def test_a_tar_by_url_that_cannot_be_used_is_named(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (shards / "x.tar").write_bytes(WHOLE[:HEADER])
    cache = tmp_path / "cache"
    with closing(FileServer(tmp_path)) as server:
        source = name if ":" in name else f"{server.url}/shards/{name}"
        options = ("--out", str(tmp_path / "out"), "--cache", str(cache), *TRAIN)
        assert build_data("text", "--source", source, *options) == 2
    said(f"exit code 2: {capsys.readouterr().err}", name.partition(" ")[0].partition(":")[0])
    assert not list(cache.rglob("*.tar*"))

"""Tars of other people: all texts that `tar -t` lists are read, or their number is printed, or the tar is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.datasets.tar_source import TAR_SUFFIXES
from dist_mem.errors import UnusableError
from tests.support.data_builders import TRAIN, build_refused, tar_of, texts_of
from tests.support.messages import refused, said_line

TEXTS = {f"s{number:03}.txt": f"Text number {number} about rivers and lamps. ".encode() * 6 for number in range(60)}


def bgzip(content: bytes) -> bytes:
    """As bgzip, pigz -i and warc tools write: many members, the last of which is empty."""
    blocks = [content[begin : begin + 1000] for begin in range(0, len(content), 1000)]
    return b"".join(map(gzip.compress, [*blocks, b""]))


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "two gzip members": lambda content: (
        gzip.compress(content[: len(content) // 2]) + gzip.compress(content[len(content) // 2 :])
    ),
    "bgzip": bgzip,
    "an empty gzip member first": lambda content: gzip.compress(b"") + gzip.compress(content),
    "bzip2": bz2.compress,
    "two bzip2 streams": lambda content: (
        bz2.compress(b"") + bz2.compress(content[:9999]) + bz2.compress(content[9999:])
    ),
    "xz": lzma.compress,
    "two xz streams": lambda content: lzma.compress(content[:9999]) + lzma.compress(content[9999:]),
}


def read(path: Path) -> tuple[dict[str, str], str]:
    """The text of each document by its title, and what is printed."""
    with redirect_stdout(io.StringIO()) as printed:
        found = texts_of("--source", path, *TRAIN)["train"]
    return {document.title.rpartition(":")[2]: document.text() for document in found}, printed.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_all_texts_of_a_tar_are_read_however_it_is_compressed(tmp_path: Path, form: str) -> None:
    for suffix in TAR_SUFFIXES:
        path = tmp_path / f"a{suffix}"
        path.write_bytes(FORMS[form](tar_of(TEXTS)))
        texts, _ = read(path)
        assert {f"{key}.txt": text.encode() for key, text in texts.items()} == TEXTS
        path.unlink()


NAMES = st.builds(
    lambda folder, stems, suffix: f"{folder}{'.'.join(stems)}{suffix}",
    st.sampled_from(["", "a/", "a.b/", "./"]),
    st.lists(st.sampled_from(["s0", "s1", "v1", "meta"]), min_size=1, max_size=3),
    st.sampled_from([".txt", ".txt", ".json", ".TXT", ".jpg", ""]),
)


@given(st.lists(NAMES, min_size=1, max_size=8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_member_is_read_or_counted_or_the_tar_is_refused(names: list[str], is_sorted: bool) -> None:
    """And a tar that is sorted by name is refused only where a member is twice in it, or no text is."""
    if is_sorted:
        names = sorted(set(names))
    contents = {
        name: json.dumps({"text": name, "id": name}).encode() if name.endswith("json") else name.encode()
        for name in names
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(contents[name])
            tar.addfile(entry, io.BytesIO(contents[name]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.tar")
        path.write_bytes(stream.getvalue())
        try:
            texts, printed = read(path)
        except UnusableError as error:
            assert not is_sorted or "twice" in str(error) or "that is a text" in str(error)
            return
    read_texts = {name for name in names if name.lower().endswith(".txt")}
    stems = {name.rpartition(".")[0] for name in read_texts}
    alone = {name for name in names if name.endswith(".json") and name[:-5] not in stems}
    dotted = {name for name in alone if "." in name[:-5].rpartition("/")[2]}
    assert sorted(texts.values()) == sorted(read_texts | (alone - dotted))
    others = len(dotted) + sum(not name.lower().endswith((".txt", ".json")) for name in names)
    counted = printed.rpartition("passed over ")[2] if others else ""
    assert sum(int(word) for word in counted.split() if word.isdecimal()) == others


def test_names_with_dots_are_texts_as_in_a_folder(tmp_path: Path) -> None:
    names = [f"book v1.{number}.txt" for number in range(30)] + ["ok.txt", "Dr. Smith vol.7.txt"]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of({**{name: name.encode() for name in names}, "ok.meta.json": b"{}"}))
    texts, printed = read(path)
    assert sorted(texts.values()) == sorted(names)
    said_line(printed, f"{path}: ", "1 .json with a second dot")


@pytest.mark.parametrize("order", [("txt", "json"), ("json", "txt")])
def test_members_of_a_sample_that_are_apart_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    members = {f"s{number}.{suffix}": b'{"id": 1}' for suffix in order for number in range(3)}
    Path("x.tar").write_bytes(tar_of(members))
    build_refused("text", "--source", "x.tar", "--out", "out", *TRAIN, named=("x.tar", "s0.", "--sort=name"))


@pytest.mark.parametrize("form", ["gzip", "bzip2", "xz"])
def test_every_cut_of_a_compressed_tar_is_found(tmp_path: Path, form: str) -> None:
    content, path = FORMS[form](tar_of(TEXTS)), tmp_path / "x.tar"
    for length in range(10, len(content), max(1, len(content) // 20)):
        path.write_bytes(content[:length])
        with pytest.raises(UnusableError, match=r"x\.tar"):
            read(path)


# A text is in UTF-8; what only decodes as UTF-8 is none.


SENTENCES = {"en": "Hello world in UTF sixteen. " * 20, "ru": "Привет, мир: это строки. " * 20}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-32"])
@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("form", ["file", "tar"])
def test_a_text_of_another_encoding_is_refused_with_or_without_a_byte_order_mark(
    tmp_path: Path, encoding: str, language: str, form: str
) -> None:
    content = SENTENCES[language].encode(encoding)
    source = tmp_path / ("u.txt" if form == "file" else "x.tar")
    source.write_bytes(content if form == "file" else tar_of({"u.txt": content}))
    with pytest.raises(UnusableError, match=rf"{source.name}.* UTF-8.*iconv"):
        texts_of("--source", source, *TRAIN)


def test_a_program_is_no_text_and_a_few_control_characters_are(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(128)) * 20)
    with refused(UnusableError, path, "UTF-8", "iconv"):
        texts_of("--source", path, *TRAIN)
    for text in ("a\0b\n", "A log\x1b[31m in red\x1b[0m.\f\v\r\n" * 9, "\0" + "a long text " * 9):
        path.write_bytes(text.encode())
        found = texts_of("--source", path, *TRAIN)["train"]
        assert found[0].text() == text.replace("\r\n", "\n")

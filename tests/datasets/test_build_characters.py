"""enwik8 and text8 as shards: official splits, newlines and spaces as published, on files generated in their format."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import read_index, read_tokens
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets.recipes import characters
from tests.support.data_builders import build_data, build_refused

SMALL, SMALL_HELD_OUT = 10_000, 500


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(characters, "NUM_BYTES", SMALL)
    monkeypatch.setattr(characters, "HELD_OUT", SMALL_HELD_OUT)


def like_enwik8(num_bytes: int) -> bytes:
    """Lines with characters of one to four bytes, none of which are whole at every edge; CR is text there."""
    line = "<page>caf\u00e9 \u4e16\u754c \U0001f99e\r [[a]]\n".encode()
    return (line * (num_bytes // len(line) + 1))[:num_bytes]


def like_text8(num_bytes: int, held_out: int) -> bytes:
    """Letters and spaces; a space at the begin of all, and at the begin of validation."""
    content = bytearray((b"anarchism originated as a term " * (num_bytes // 31 + 1))[:num_bytes])
    for edge in (num_bytes - held_out, num_bytes - 1, num_bytes - held_out - 1, num_bytes - 2 * held_out - 1):
        content[edge] = ord("x")
    content[0] = content[num_bytes - 2 * held_out] = ord(" ")
    content[1] = content[num_bytes - 2 * held_out + 1] = ord("a")
    return bytes(content)


def build(content: bytes, folder: Path, *options: str) -> int:
    (folder / "corpus").write_bytes(content)
    return build_data("characters", "--source", str(folder / "corpus"), "--out", str(folder / "out"), *options)


def bytes_of(folder: Path, split: str) -> bytes:
    tokens = read_tokens(read_index(folder / "out" / split), 0)
    return tokens.astype(np.uint8).tobytes()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("newlines", ["keep", "drop"])
def test_enwik8_is_its_bytes_with_newlines_or_without(tmp_path: Path, newlines: str) -> None:
    content = like_enwik8(SMALL)
    with pytest.raises(UnicodeDecodeError):
        content[: SMALL - 2 * SMALL_HELD_OUT].decode()  # a character is cut, or this test tests too little
    assert build(content, tmp_path, "--newlines", newlines) == 0
    edges = {"train": (0, 9_000), "validation": (9_000, 9_500), "test": (9_500, 10_000)}
    for split, (start, stop) in edges.items():
        expected = content[start:stop] if newlines == "keep" else content[start:stop].replace(b"\n", b"")
        index = read_index(tmp_path / "out" / split)
        assert bytes_of(tmp_path, split) == expected
        assert index.num_bytes == index.num_tokens == len(expected)  # bits per byte are bits per token
    assert not verify_dataset(tmp_path / "out")


@pytest.mark.usefixtures("small")
def test_text8_loses_the_spaces_at_the_ends_of_its_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = like_text8(SMALL, SMALL_HELD_OUT)
    assert build(content, tmp_path) == 0
    assert bytes_of(tmp_path, "train") == content[1:9_000]
    assert bytes_of(tmp_path, "validation") == content[9_001:9_500]
    assert bytes_of(tmp_path, "test") == content[9_500:]
    assert "not the official text8" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_a_file_known_by_its_checksum_must_have_the_published_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = like_text8(SMALL, SMALL_HELD_OUT)
    monkeypatch.setitem(characters.OFFICIAL_MD5, "text8", hashlib.md5(content).hexdigest())
    counts = {"train": 8_999, "validation": 499, "test": 500}
    monkeypatch.setitem(characters.OFFICIAL_TOKENS, "text8", counts)
    assert build(content, tmp_path) == 0
    assert "validation: 499 tokens, as published for text8" in capsys.readouterr().out
    monkeypatch.setitem(characters.OFFICIAL_TOKENS, "text8", {**counts, "test": 499})
    build_refused(
        *("characters", "--source", tmp_path / "corpus", "--out", tmp_path / "out", "--overwrite"),
        named=("test: 500 tokens, but text8 has 499",),
    )


@pytest.mark.usefixtures("small")
def test_another_file_is_not_taken_for_one_that_is_built(tmp_path: Path) -> None:
    content = like_enwik8(SMALL)
    assert build(content, tmp_path) == 0
    assert build(content, tmp_path) == 0
    assert build(content.replace(b"page", b"sage"), tmp_path) == 2  # of the same size


@pytest.mark.parametrize("content", [b"PK\x03\x04rest", b"too short", None])
def test_what_is_neither_is_named(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "corpus"
    source.mkdir() if content is None else source.write_bytes(content)
    build_refused("characters", "--source", source, "--out", tmp_path / "out", named=(source,))


def test_bytes_that_are_no_utf_8_survive() -> None:
    tokenizer, content = BytesTokenizer(), bytes(range(256))
    assert tokenizer.encode(content.decode("utf-8", "surrogateescape")).tolist() == list(content)


@pytest.mark.nightly
@pytest.mark.parametrize("corpus", ["enwik8", "text8"])
def test_the_official_sizes(tmp_path: Path, corpus: str) -> None:
    total, held_out = characters.NUM_BYTES, characters.HELD_OUT
    assert (total, held_out) == (100_000_000, 5_000_000)
    content = like_enwik8(total) if corpus == "enwik8" else like_text8(total, held_out)
    assert build(content, tmp_path, "--newlines", "keep") == 0
    sizes = [read_index(tmp_path / "out" / split).num_tokens for split in ("train", "validation", "test")]
    stripped = int(corpus == "text8")
    assert sizes == [90_000_000 - stripped, 5_000_000 - stripped, 5_000_000]

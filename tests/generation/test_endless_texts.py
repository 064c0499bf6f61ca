"""A text without an end, as /dev/zero is, is refused before it fills the memory, wherever a text is read."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.datasets import rows
from dist_mem.datasets.recipes.characters import read_whole
from dist_mem.datasets.source import read_text
from dist_mem.errors import UnusableError
from dist_mem.generation.continue_prompts import read_prompt
from dist_mem.generation.text import read_file
from dist_mem.runtime import files
from tests.support.messages import refused

LIMIT = 2_000_000
ZERO = Path("/dev/zero")


def read_compressed_rows(folder: Path) -> None:
    path = folder / "rows.json.gz"
    path.write_bytes(gzip.compress(bytes(LIMIT + 1)))
    list(rows.read_rows(rows.RowFile(path, "text", None, 0)))


READERS: dict[str, Callable[[Path], object]] = {
    "--prompt-file, --text and `read`": lambda folder: read_file(ZERO, "--text"),
    "a text of a builder": lambda folder: read_text(ZERO),
    "enwik8": lambda folder: read_whole(ZERO),
    "a row that is small as it is stored": read_compressed_rows,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_text_without_an_end_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    monkeypatch.setattr(files.read_at_most, "__defaults__", (LIMIT,))
    monkeypatch.setattr(rows, "MAX_TEXT_BYTES", LIMIT)
    with refused(UnusableError, "rows.json.gz, line 1" if reader.startswith("a row") else ZERO):
        READERS[reader](tmp_path)


def test_a_text_is_read_as_those_of_training_are(tmp_path: Path) -> None:
    """Out of a pipe too, as in --text <(zcat book.gz), which has no size."""
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r")
    with path.open("rb") as stream:
        assert read_file(Path(f"/dev/fd/{stream.fileno()}"), "--text") == "One.\nTwo.\n"
    assert read_prompt(None, path) == read_prompt("One.\r\nTwo.\r", None) == "One.\nTwo.\n"

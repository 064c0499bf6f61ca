"""Input of a builder: documents as text, and the places where a word refers back to an earlier one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dist_mem.data.tar import check_id
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import read_at_most

_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r\x1b"})  # and without that of coloured logs
_FEW_CONTROLS = 3  # are in texts, which keep them


class RecallSpan(NamedTuple):
    """A word predictable only from an earlier place in its document; character offsets in the LF text."""

    start: int
    stop: int
    referent: int  # first character of the latest earlier mention that the word recalls


class FileSlice(NamedTuple):
    """Part of a file, byte for byte: for a corpus that is one large file, which is never read whole."""

    path: Path
    start: int  # bytes
    stop: int
    sha256: str  # of the whole file, to identify it
    without: bytes = b""  # bytes to leave out, as newlines in the published preparation of enwik8

    def read(self) -> bytes:
        """Read the bytes, except those of `without`."""
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            content = stream.read(self.stop - self.start)
        return content.replace(self.without, b"") if self.without else content


class StoredText(Protocol):
    """A text that is read where it is stored, as a row of a file is, and identified by its content."""

    @property
    def num_bytes(self) -> int: ...  # in UTF-8

    @property
    def digest(self) -> bytes: ...  # of the text

    def read(self) -> str: ...  # the text with LF line ends


@dataclass(frozen=True)
class SourceDocument:
    """One document of a builder."""

    id: str
    title: str
    source: Path | str | FileSlice | StoredText  # a UTF-8 file, the text itself, part of a file, a row of one
    year: int | None = None
    recall: Sequence[RecallSpan | tuple[int, int, int]] | None = None  # None: not recorded for this document
    scored: Sequence[tuple[int, int]] | None = None  # character spans in the LF text whose tokens count; None: all

    @cached_property  # used often, and slow on a network file system
    def num_bytes(self) -> int:
        """Size of the source, by which documents are distributed among workers."""
        if isinstance(self.source, FileSlice):
            return self.source.stop - self.source.start
        if isinstance(self.source, Path):
            return self.source.stat().st_size
        return len(self.source.encode()) if isinstance(self.source, str) else self.source.num_bytes

    @cached_property
    def modification_time(self) -> int:
        """Modification time of the file in ns, 0 for text: detects edits since a killed build."""
        return self.source.stat().st_mtime_ns if isinstance(self.source, Path) else 0

    def text(self) -> str:
        """Return the text with LF line ends; part of a file unchanged, with non-UTF-8 bytes as lone surrogates."""
        if isinstance(self.source, FileSlice):
            return self.source.read().decode("utf-8", "surrogateescape")
        if isinstance(self.source, Path):
            return read_text(self.source)
        return with_lf(self.source) if isinstance(self.source, str) else self.source.read()

    def signature(self) -> list[Any]:
        """Return values that identify this document without reading its file; the same on every machine."""
        content: Any = self.num_bytes
        if isinstance(self.source, FileSlice):
            content = [self.source.start, self.source.stop, self.source.sha256, self.source.without.hex()]
        elif isinstance(self.source, str):
            content = hashlib.sha256(self.source.encode()).hexdigest()
        elif not isinstance(self.source, Path):
            content = self.source.digest.hex()
        scored = [] if self.scored is None else [self.scored]  # left out if None, as in builds before `scored` existed
        return [self.id, self.title, self.year, content, self.recall, *scored]


def with_lf(text: str) -> str:
    """Return a text with LF for each line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def encode_text(text: str) -> bytes:
    """Return the UTF-8 bytes of a text from `SourceDocument.text`."""
    return text.encode("utf-8", "surrogateescape")


def read_text(path: Path) -> str:
    """Return a file's text with LF line ends, without the byte order mark (U+FEFF) that some editors put first.

    Raises:
        UnusableError: as `check_text` and `decode_text`; or the file is too long.
    """
    content = read_at_most(path)
    check_text(content, str(path))
    return with_lf(decode_text(content, str(path), has_mark=True))


def check_text(content: bytes, where: str) -> None:
    """Check that bytes are text: UTF-16 without a byte order mark is valid UTF-8, with many control characters.

    Raises:
        UnusableError: control characters are more than a tenth of it.
    """
    controls = len(content) - len(content.translate(None, _CONTROLS))
    if controls > max(_FEW_CONTROLS, len(content) // 10):
        raise UnusableError(
            f"{where} is no text in UTF-8: {controls:,} of its {len(content):,} bytes are control characters, as in "
            "UTF-16 and in programs: convert it, for example with iconv -f UTF-16LE -t UTF-8, or leave it out"
        )


def decode_text(content: bytes, where: str, *, has_mark: bool) -> str:
    """Decode UTF-8.

    Args:
        has_mark: a byte order mark may come first, and is dropped.

    Raises:
        UnusableError: it is not UTF-8; names the first bad byte.
    """
    try:
        return content.decode("utf-8-sig" if has_mark else "utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(
            f"{where} is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x}): convert it, for example with "
            "iconv"
        ) from error


def check_sources(documents: Sequence[SourceDocument], split: str) -> None:
    """Raise ValueError for unusable or repeated ids, before any work is done."""
    seen: set[str] = set()
    for document in documents:
        check_id(document.id, seen, split)


def recall_distances(document: SourceDocument, text: str, starts: np.ndarray) -> np.ndarray:
    """Return the distance in tokens from each token to its referent, (num_tokens,) int32, 0 = it recalls nothing.

    Every token that overlaps a recall span, in part or whole, gets its distance back to the token with the referent's
    first character. Of two spans that share a token the later one counts.

    Args:
        starts: (num_tokens,) start of each token in `text`, from `Tokenizer.encode_with_offsets`.

    Raises:
        ValueError: a span lies outside the text, is empty, or does not come after its referent.
    """
    spans = np.array(document.recall or (), dtype=np.int64).reshape(-1, 3)
    start, stop, referent = spans.T
    outside = spans[~((referent >= 0) & (referent < start) & (start < stop) & (stop <= len(text)))]
    if len(outside):
        needs = f"needs 0 <= referent < start < stop <= {len(text)}, the length of the text in characters"
        raise ValueError(f"document {document.id}: recall span {tuple(outside[0].tolist())} {needs}")
    first, source = _tokens_at(starts, start), _tokens_at(starts, referent)
    shared = spans[source >= first]
    if len(shared):
        span = tuple(shared[0].tolist())
        raise ValueError(f"document {document.id}: recall span {span} begins in the token of its referent")
    lengths = np.searchsorted(starts, stop, side="left") - first
    # the tokens of all spans, concatenated, and the last span of each token
    tokens = np.arange(lengths.sum()) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    span_of = np.full(len(starts), -1)
    np.maximum.at(span_of, tokens, np.repeat(np.arange(len(spans)), lengths))
    recalling = np.flatnonzero(span_of >= 0)
    distances = np.zeros(len(starts), dtype=np.int32)
    distances[recalling] = recalling - source[span_of[recalling]]
    return distances


def scored_tokens(document: SourceDocument, text: str, starts: np.ndarray) -> np.ndarray:
    """Return which tokens are scored, (num_tokens,) bool: those that begin within a span of `document.scored`.

    Args:
        starts: (num_tokens,) start of each token in `text`, from `Tokenizer.encode_with_offsets`.

    Raises:
        ValueError: a span lies outside the text, or is empty.
    """
    spans = np.array(document.scored or (), dtype=np.int64).reshape(-1, 2)
    outside = spans[~((spans[:, 0] >= 0) & (spans[:, 0] < spans[:, 1]) & (spans[:, 1] <= len(text)))]
    if len(outside):
        needs = f"needs 0 <= start < stop <= {len(text)}, the length of the text in characters"
        raise ValueError(f"document {document.id}: scored span {tuple(outside[0].tolist())} {needs}")
    begun = np.searchsorted(np.sort(spans[:, 0]), starts, side="right")
    ended = np.searchsorted(np.sort(spans[:, 1]), starts, side="right")
    return begun > ended


def _tokens_at(starts: np.ndarray, characters: np.ndarray) -> np.ndarray:
    """Return the token that contains the first byte of each character; a token may be longer or shorter than it."""
    tokens = np.searchsorted(starts, characters, side="right") - 1
    return np.searchsorted(starts, starts[tokens], side="left")

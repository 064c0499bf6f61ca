"""What a builder feeds in: documents as text, and where in them a word refers back to an earlier one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist_mem.data.tar import check_id


class RecallSpan(NamedTuple):
    """A word that can be predicted only from an earlier place in its document; character offsets in the LF text."""

    start: int
    stop: int
    referent: int  # first character of the latest earlier mention of what the word recalls


class FileSlice(NamedTuple):
    """Part of a file, byte for byte: a corpus that is one large file is cut so, and never read whole."""

    path: Path
    start: int  # bytes
    stop: int
    sha256: str  # of the whole file: says which one it is
    without: bytes = b""  # what is left out, as newlines in the published preparation of enwik8

    def read(self) -> bytes:
        """The bytes, without what is left out."""
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            content = stream.read(self.stop - self.start)
        return content.replace(self.without, b"") if self.without else content


@dataclass(frozen=True)
class SourceDocument:
    """One document of a builder."""

    id: str
    title: str
    source: Path | str | FileSlice  # a UTF-8 file, the text itself, or part of a file
    year: int | None = None
    recall: Sequence[RecallSpan | tuple[int, int, int]] | None = None  # None: not recorded for this document
    scored: Sequence[tuple[int, int]] | None = None  # character spans in the LF text whose tokens count; None: all

    @cached_property  # asked for often, and a network file system takes its time
    def num_bytes(self) -> int:
        """Size of the source, which decides how documents are shared among workers."""
        if isinstance(self.source, FileSlice):
            return self.source.stop - self.source.start
        return self.source.stat().st_size if isinstance(self.source, Path) else len(self.source.encode())

    @cached_property
    def modified(self) -> int:
        """Modification time of the file in ns, 0 for text: tells an edited file from one a killed build has read."""
        return self.source.stat().st_mtime_ns if isinstance(self.source, Path) else 0

    def text(self) -> str:
        """The text with LF line ends; part of a file as it is, and what is not UTF-8 in it as lone surrogates."""
        if isinstance(self.source, FileSlice):
            return self.source.read().decode("utf-8", "surrogateescape")
        text = read_text(self.source) if isinstance(self.source, Path) else self.source
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def signature(self) -> list[Any]:
        """What tells this document from another without reading its file; the same on every machine."""
        content: Any = self.num_bytes
        if isinstance(self.source, FileSlice):
            content = [self.source.start, self.source.stop, self.source.sha256, self.source.without.hex()]
        elif isinstance(self.source, str):
            content = hashlib.sha256(self.source.encode()).hexdigest()
        scored = [] if self.scored is None else [self.scored]  # left out, as builds have it that know of none
        return [self.id, self.title, self.year, content, self.recall, *scored]


def encoded(text: str) -> bytes:
    """The UTF-8 bytes of a text that `SourceDocument.text` gave."""
    return text.encode("utf-8", "surrogateescape")


def read_text(path: Path) -> str:
    """A file's text as it is, without the mark (U+FEFF) that some editors put first.

    Raises:
        ValueError: the file is not UTF-8; names it and the first bad byte.
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}): convert it, "
            "for example with iconv"
        ) from error


def check_sources(documents: Sequence[SourceDocument], split: str) -> None:
    """Refuse unusable or repeated ids before any work is done."""
    seen: set[str] = set()
    for document in documents:
        check_id(document.id, seen, split)


def recall_distances(document: SourceDocument, text: str, starts: np.ndarray) -> np.ndarray:
    """Distance in tokens from each token to what it recalls, (num_tokens,) int32, 0 = it recalls nothing.

    Every token that overlaps a recall span, in part or whole, gets its distance back to the token that holds the
    referent's first character. Of two spans that share a token the later one counts.

    Args:
        starts: (num_tokens,) where in `text` each token starts, as `Tokenizer.encode_with_offsets` gives it.

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
    # the tokens of all spans end to end, and the last span of each
    tokens = np.arange(lengths.sum()) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    span_of = np.full(len(starts), -1)
    np.maximum.at(span_of, tokens, np.repeat(np.arange(len(spans)), lengths))
    recalling = np.flatnonzero(span_of >= 0)
    distances = np.zeros(len(starts), dtype=np.int32)
    distances[recalling] = recalling - source[span_of[recalling]]
    return distances


def scored_tokens(document: SourceDocument, text: str, starts: np.ndarray) -> np.ndarray:
    """Which tokens are scored, (num_tokens,) bool: those that begin within a span of `document.scored`.

    Args:
        starts: (num_tokens,) where in `text` each token starts, as `Tokenizer.encode_with_offsets` gives it.

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
    """The token that holds the first byte of each character; either may be the longer one."""
    tokens = np.searchsorted(starts, characters, side="right") - 1
    return np.searchsorted(starts, starts[tokens], side="left")

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
from dist_mem.data.tokenizer import Tokenizer


class RecallSpan(NamedTuple):
    """A word that can be predicted only from an earlier place in its document; character offsets in the LF text."""

    start: int
    stop: int
    referent: int  # first character of the latest earlier mention of what the word recalls


@dataclass(frozen=True)
class SourceDocument:
    """One document of a builder."""

    id: str
    title: str
    source: Path | str  # a UTF-8 file, or the text itself
    year: int | None = None
    recall: Sequence[RecallSpan | tuple[int, int, int]] | None = None  # None: not recorded for this document

    @cached_property  # asked for often, and a network file system takes its time
    def num_bytes(self) -> int:
        """Size of the source, which decides how documents are shared among workers."""
        return self.source.stat().st_size if isinstance(self.source, Path) else len(self.source.encode())

    @cached_property
    def modified(self) -> int:
        """Modification time of the file in ns, 0 for text: tells an edited file from one a killed build has read."""
        return self.source.stat().st_mtime_ns if isinstance(self.source, Path) else 0

    def text(self) -> str:
        """The text with LF line ends."""
        text = read_text(self.source) if isinstance(self.source, Path) else self.source
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def signature(self) -> list[Any]:
        """What tells this document from another without reading its file; the same on every machine."""
        content = self.num_bytes if isinstance(self.source, Path) else hashlib.sha256(self.source.encode()).hexdigest()
        recall = None if self.recall is None else [list(span) for span in self.recall]
        return [self.id, self.title, self.year, content, recall]


def read_text(path: Path) -> str:
    """A file's text as it is.

    Raises:
        ValueError: the file is not UTF-8; names it and the first bad byte.
    """
    try:
        return path.read_bytes().decode("utf-8")
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


def recall_distances(document: SourceDocument, text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Distance in tokens from each token to what it recalls, (num_tokens,) int32, 0 = it recalls nothing.

    Every token that overlaps a recall span, in part or whole, gets its distance back to the token that holds the
    referent's first character. Spans are taken in order; of two that share a token the later one counts.

    Raises:
        ValueError: a span lies outside the text, is empty, or does not come after its referent.
    """
    tokens, starts = tokenizer.encode_with_offsets(text)
    distances = np.zeros(len(tokens), dtype=np.int32)
    for start, stop, referent in document.recall or ():
        if not 0 <= referent < start < stop <= len(text):
            raise ValueError(
                f"document {document.id}: recall span ({start}, {stop}, {referent}) needs "
                f"0 <= referent < start < stop <= {len(text)}, the length of the text in characters"
            )
        first, source = _token_at(starts, start), _token_at(starts, referent)
        if source >= first:
            raise ValueError(
                f"document {document.id}: recall span ({start}, {stop}, {referent}) begins in the token of its referent"
            )
        last = int(np.searchsorted(starts, stop, side="left"))  # the first token after the span
        distances[first:last] = np.arange(first, last) - source
    return distances


def _token_at(starts: np.ndarray, character: int) -> int:
    """The token that holds a character's first byte; either may be the longer one."""
    token = np.searchsorted(starts, character, side="right") - 1
    return int(np.searchsorted(starts, starts[token], side="left"))

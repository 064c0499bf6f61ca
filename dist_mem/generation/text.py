"""Text in and out: files, incremental decoding of tokens, and measures of repetition in a text (rep-n, distinct-n).

Decoding holds back the bytes of an incomplete character. Repetition counts words, as the code of Su et al. does, so
that models with different tokenizers are comparable. Deviation: Welleck et al. count tokens of their model. Only the
continuation is counted, not the prompt.
"""

from __future__ import annotations

import codecs
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.files import read_at_most


def read_file(path: Path, option: str) -> str:
    """Return a text with LF line ends and without a byte order mark (U+FEFF), as the builders read training texts.

    Args:
        option: of the command line that names the file, for messages; empty: a positional argument.

    Raises:
        UnusableError: the file does not exist, is not UTF-8 or is too long.
        UnfitError: its disk fails.
    """
    named = f"{option} {path}".strip()
    try:
        text = read_at_most(path).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UnusableError(
            f"{named}: byte {error.start} is not UTF-8; convert the file, as with iconv -t utf-8"
        ) from error
    except OSError as error:
        raise run_error(error, f"{named}: {error.strerror}") from error


class TextWriter:
    """Decodes the text of one lane token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = tokenizer.pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # invalid bytes become U+FFFD
        self.text = ""

    def add(self, token: int) -> str:
        """Add a token and return the text it completes, which may be empty."""
        return self._write_part(self.decoder.decode(self.pieces[token]))

    def end(self) -> str:
        """Return the remaining text: U+FFFD for an incomplete character."""
        return self._write_part(self.decoder.decode(b"", final=True))

    def _write_part(self, part: str) -> str:
        self.text += part
        return part


SIZES = (1, 2, 3, 4)  # n


class Repetition(NamedTuple):
    """Repetition of the continuations of one model, by n; None where no text has n words."""

    rep: dict[int, float | None]
    distinct: dict[int, float | None]


def ngrams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return all sequences of `size` consecutive words, in order."""
    return [tuple(words[begin : begin + size]) for begin in range(len(words) - size + 1)]


def rep(text: str, size: int) -> float | None:
    """Return the share of n-grams that occurred earlier in the text: 1 - distinct n-grams / n-grams.

    Source: Welleck et al. 2020, "Neural text generation with unlikelihood training" (seq-rep-n); Su et al. 2022, "A
    contrastive framework for neural text generation" (rep-n, there in per cent). Deviation: the code of Su et al.
    leaves out the last n-gram of a text.
    """
    found = ngrams(text.split(), size)
    return 1.0 - len(set(found)) / len(found) if found else None


def distinct(texts: Sequence[str], size: int) -> float | None:
    """Return the number of distinct n-grams of all texts together, divided by the number of their words.

    Source: Li et al. 2016, "A diversity-promoting objective function for neural conversation models", sec. 5.
    """
    words = [text.split() for text in texts]
    num_words = sum(map(len, words))
    found = {ngram for text in words for ngram in ngrams(text, size)}
    return len(found) / num_words if found else None


def measure(texts: Sequence[str]) -> Repetition:
    """Return rep-n as the mean over texts that have an n-gram, and distinct-n over all texts together.

    The code of Welleck et al. takes the same mean; that of Su et al. sums the n-grams of all texts before it divides.
    """
    reps: dict[int, float | None] = {}
    for size in SIZES:
        values = [value for text in texts if (value := rep(text, size)) is not None]
        reps[size] = statistics.fmean(values) if values else None
    return Repetition(reps, {size: distinct(texts, size) for size in SIZES})

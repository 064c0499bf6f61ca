"""Incremental decoding of tokens to text; bytes of an incomplete character are held back."""

from __future__ import annotations

import codecs
import unicodedata

from dist_mem.data.tokenizers.base import Tokenizer


class TextWriter:
    """Decodes the text of one lane token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = tokenizer.pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # invalid bytes become U+FFFD
        self.text = ""

    def add(self, token: int) -> str:
        """Add a token and return the text it completes, which may be empty."""
        return self._written(self.decoder.decode(self.pieces[token]))

    def end(self) -> str:
        """Return the remaining text: U+FFFD for an incomplete character."""
        return self._written(self.decoder.decode(b"", final=True))

    def _written(self, part: str) -> str:
        self.text += part
        return part


def printable(text: str) -> str:
    """Return the text with control characters, which could steer a terminal, as U+FFFD; newline and tab are kept."""
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)

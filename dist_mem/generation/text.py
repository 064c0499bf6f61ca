"""Tokens to text as they come: the bytes of a character that is not whole yet are held back."""

from __future__ import annotations

import codecs
import unicodedata

from dist_mem.data.tokenizers.base import Tokenizer


class TextWriter:
    """The text of one lane, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = tokenizer.pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # bytes that are no character become U+FFFD
        self.text = ""

    def add(self, token: int) -> str:
        """What one token more completes of the text, which may be nothing."""
        return self._written(self.decoder.decode(self.pieces[token]))

    def end(self) -> str:
        """What is left: U+FFFD for a character that was cut."""
        return self._written(self.decoder.decode(b"", final=True))

    def _written(self, part: str) -> str:
        self.text += part
        return part


def printable(text: str) -> str:
    """Text without what would steer a terminal: control characters but newline and tab become U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)

"""Text in and out: files, and incremental decoding of tokens, which holds back bytes of an incomplete character."""

from __future__ import annotations

import codecs
from pathlib import Path

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import read_at_most


def read_file(path: Path, option: str) -> str:
    """Return a text with LF line ends and without a byte order mark (U+FEFF), as the builders read training texts.

    Args:
        option: of the command line that names the file, for messages; empty: a positional argument.

    Raises:
        UnusableError: the file does not exist, is not UTF-8 or is too long.
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
        raise UnusableError(f"{named}: {error.strerror}") from error


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

"""Base class of tokenizers: text to token ids and back, and the bytes of text of each id."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Tokenizer:
    """Converts text to token ids and back; subclasses define how text is cut into pieces."""

    kind: str  # as in tokenizer.json
    keeps_text: bool = True  # the pieces of a text, joined, are its bytes
    file_name: str | None = None  # of the trained model in a data directory

    def __init__(self, pieces: list[bytes], *, bos_id: int, fingerprint: str) -> None:
        """`pieces`: UTF-8 bytes of every id, none for BOS and the like; `fingerprint`: of the whole vocabulary."""
        self.pieces = pieces
        self.piece_bytes = np.array([len(piece) for piece in pieces])
        self.vocab_size = len(pieces)
        self.bos_id = bos_id
        self.fingerprint = fingerprint
        self.dtype = np.dtype(np.uint16 if len(pieces) <= 2**16 else np.uint32)  # of token ids

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, (num_tokens,) uint16 (uint32 above 65,536 pieces), without BOS."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of token ids; BOS and the like are empty, bytes of a cut character become U+FFFD."""
        pieces = self.pieces
        return b"".join([pieces[token] for token in np.asarray(ids, dtype=np.int64).tolist()]).decode(
            "utf-8", "replace"
        )

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids as `encode`, and the index in `text` of the character of each token's first byte, int64."""
        ids = self.encode(text)
        ends = np.cumsum(self.piece_bytes[ids])
        text_bytes = np.frombuffer(text.encode(), dtype=np.uint8)
        characters = np.cumsum((text_bytes & 0xC0) != 0x80) - 1  # of each byte; continuation bytes are 0b10xxxxxx
        return ids, characters[ends - self.piece_bytes[ids]]

    @property
    def eos_id(self) -> int:
        """What ends a text: BOS, unless the tokenizer has another token for it."""
        return self.bos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that a model may write to end its text: none, as a document has no last token of its own."""
        return frozenset()

    def content(self) -> bytes | None:
        """Return the content of the file `file_name`; None if there is none."""
        return None

    @classmethod
    def from_content(cls, content: bytes) -> Tokenizer:
        """Return the tokenizer with this `content`. Raises RuntimeError or ValueError if it is invalid."""
        raise NotImplementedError

"""One token per byte: needs no training, and encodes any text."""

from __future__ import annotations

import hashlib

import numpy as np

from dist_mem.data.tokenizers.base import Tokenizer


class BytesTokenizer(Tokenizer):
    """One token per byte of UTF-8, and BOS: 257 ids."""

    kind = "bytes"

    def __init__(self) -> None:
        fingerprint = hashlib.sha256(b"dist_mem bytes tokenizer 1").hexdigest()
        super().__init__([bytes([byte]) for byte in range(256)] + [b""], bos_id=256, fingerprint=fingerprint)

    @classmethod
    def from_content(cls, content: bytes) -> BytesTokenizer:
        return cls()

    def encode(self, text: str) -> np.ndarray:
        # Lone surrogates represent bytes that are not UTF-8 (datasets/source.py): a split of enwik8 may cut a character
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8).astype(self.dtype)

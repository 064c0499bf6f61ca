"""Data directories for the stages of a curriculum."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer


def make_data(folder: Path, lengths: list[int], *, num_scored: int | None = None) -> Path:
    """Write a data directory of byte documents, of which the last `num_scored` tokens are targets; None: all are."""
    tokenizer = BytesTokenizer()
    save_tokenizer(tokenizer, folder)
    documents = []
    for number, size in enumerate(lengths):
        tokens = np.arange(size, dtype=np.uint16)
        mask = None if num_scored is None else tokens >= size - num_scored
        documents.append(TokenizedDocument(f"d{number}", f"d{number}", None, 1, size, tokens, mask=mask))
    fingerprint = tokenizer.fingerprint
    write_split(documents, folder / "train", name=folder.name, split="train", tokenizer_fingerprint=fingerprint)
    return folder

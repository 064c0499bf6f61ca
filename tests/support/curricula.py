"""Data directories for the stages of a curriculum."""

from pathlib import Path

import numpy as np

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer


def make_data(folder: Path, lengths: list[int], *, num_scored: int | None = None, answers: bool = False) -> Path:
    """Write a data directory of byte documents, of which the last `num_scored` tokens are targets; None: all are.

    `answers`: the last token is the same in all, recalls the one before, and alone is scored; there is a validation
    split.
    """
    tokenizer = BytesTokenizer()
    save_tokenizer(tokenizer, folder)
    documents = []
    for number, size in enumerate(lengths):
        tokens = np.arange(size, dtype=np.uint16)
        mask = None if num_scored is None else tokens >= size - num_scored
        recall = None
        if answers:
            mask = tokens == size - 1
            recall = mask.astype(np.int32)
            tokens[-1] = 200
        documents.append(TokenizedDocument(f"d{number}", f"d{number}", None, 1, size, tokens, mask=mask, recall=recall))
    fingerprint = tokenizer.fingerprint
    for split in ("train", "validation") if answers else ("train",):
        write_split(documents, folder / split, name=folder.name, split=split, tokenizer_fingerprint=fingerprint)
    return folder

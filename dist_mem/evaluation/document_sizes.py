"""Sizes of the scored tokens of documents: words, bytes, depths, distances of recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.shard import Index, check_document, read_mask, read_recall, read_tokens
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.evaluation.depth import answer_depth
from dist_mem.evaluation.split_layout import Extent
from dist_mem.runtime.distributed import World


class DocumentSizes(NamedTuple):
    """Sizes of the documents of one rank, measured before scoring."""

    tokens: Tensor  # (documents,) float64, to be scored; 0 for documents of other ranks
    words: Tensor  # (documents,) float64, of the scored tokens; nan if not known, 0 for documents of other ranks
    bytes: Tensor  # (documents,) float64, of the scored tokens; 0 for documents of other ranks
    depths: Tensor  # (documents,) float64, of what its answer recalls; nan if not known, 0 for other ranks' documents
    max_distance: int  # largest recall distance, 0 if none is recorded


def measure_documents(
    index: Index, documents: Sequence[int], own: set[int], extent: Extent, tokenizer: Tokenizer, world: World
) -> DocumentSizes:
    """Check the documents that this rank reads and measure its own; all ranks raise if any finds a damaged one."""

    def measure() -> DocumentSizes:
        tokens, words, num_bytes, depths = torch.zeros(4, len(extent.lengths), dtype=torch.float64)
        max_distance = 0
        for document in documents:
            check_document(index, document)
            if document in own:
                size = text_size(index, document, extent, tokenizer)
                tokens[document], words[document], num_bytes[document] = size
                depths[document] = answer_depth(index, document, int(extent.lengths[document]))
            recall = read_recall(index, document, 0, int(extent.lengths[document]))
            max_distance = max(max_distance, 0 if recall is None else int(recall.max(initial=0)))
        return DocumentSizes(tokens, words, num_bytes, depths, max_distance)

    share = world.agree(measure, f"opening {index.split_dir}")
    return share._replace(max_distance=max(world.gather(share.max_distance)))


def is_whole(index: Index, document: int, extent: Extent) -> bool:
    """Return whether every token of the document is scored."""
    entry = index.documents[document]
    is_cut = int(extent.lengths[document]) != entry.num_tokens
    return entry.mask_offset is None and not is_cut and not len(extent.left_out(document))


class TextSize(NamedTuple):
    """Size of the scored tokens of a document."""

    tokens: int
    words: float  # nan if not known
    bytes: int


def text_size(index: Index, document: int, extent: Extent, tokenizer: Tokenizer) -> TextSize:
    """Return the size of the scored tokens, from the index for whole documents, else from the decoded text.

    In a vocabulary of words every token is one, also `<eos>` at a line end, as the published counts of WikiText have
    it. With other vocabularies only white space ends a word, and words are nan if blocks leave out tokens, since such a
    token is often only a part of a word.
    """
    entry, length = index.documents[document], int(extent.lengths[document])
    if is_whole(index, document, extent):
        return TextSize(length, length if are_words(tokenizer) else entry.words, entry.bytes)
    tokens = read_tokens(index, document, 0, length)
    mask = read_mask(index, document, 0, length)
    scored = np.ones(length, dtype=bool) if mask is None else np.array(mask, dtype=bool)
    left_out = extent.left_out(document)
    loses = bool(scored[left_out].any())
    scored[left_out] = False
    num_tokens = int(np.count_nonzero(scored))
    num_bytes = _bytes_of(read_tokens(index, document), scored, entry.bytes, tokenizer)
    if loses and not are_words(tokenizer):
        return TextSize(num_tokens, math.nan, num_bytes)
    edges = np.flatnonzero(np.diff(scored)) + 1  # borders between scored and unscored tokens
    runs = [
        run for run, is_scored in zip(np.split(tokens, edges), np.split(scored, edges), strict=True) if is_scored[0]
    ]
    return TextSize(num_tokens, sum(count_words(run, tokenizer) for run in runs), num_bytes)


def _bytes_of(tokens: np.ndarray, scored: np.ndarray, whole: int, tokenizer: Tokenizer) -> int:
    """Return the bytes of the scored tokens; where pieces lack white space, by their share of those of the document.

    Args:
        tokens: (N,) of the document.
        scored: (n,) bool, of its first n tokens.
        whole: bytes of its text.
    """
    sizes = tokenizer.piece_bytes[tokens.astype(np.int64)]
    of_scored = int(sizes[: len(scored)][scored].sum())
    return of_scored if tokenizer.keeps_text else round(whole * of_scored / max(int(sizes.sum()), 1))


def count_words(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the number of words of tokens that follow each other."""
    return len(tokens) if are_words(tokenizer) else len(tokenizer.decode(tokens).split())


def are_words(tokenizer: Tokenizer) -> bool:
    """Return whether every token is a word."""
    return tokenizer.kind == WordTokenizer.kind

"""Sizes of what is scored: with every kind of tokenizer, parts of a document add up to the whole."""

from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.evaluation.document_sizes import text_size
from dist_mem.evaluation.split_layout import Extent
from tests.support.tokenizer_kinds import MAKE

TEXT = "The whale, an old one, came near.\n\nNobody on board said a word; 中文, and 7 ropes were torn.\n" * 4


@pytest.mark.parametrize("kind", MAKE)
def test_the_bytes_of_parts_are_those_of_the_document(kind: str, tmp_path: Path) -> None:
    """Also where tokens have no white space, as those of BERT: their bits per byte would count letters only."""
    tokenizer = MAKE[kind](TEXT)
    tokens, size = tokenizer.encode(TEXT), len(TEXT.encode())
    number = len(tokens)
    masks = {"early": np.arange(number) < 9, "late": np.arange(number) >= 9}
    parts = [
        TokenizedDocument(name, name, None, words=len(TEXT.split()), bytes=size, tokens=tokens, mask=mask)
        for name, mask in {**masks, "whole": None}.items()
    ]
    fingerprint = tokenizer.fingerprint
    index = write_split(parts, tmp_path / "test", name="tiny", split="test", tokenizer_fingerprint=fingerprint)
    whole = Extent(np.full(3, number))
    early, late, both = (text_size(index, place, whole, tokenizer).bytes for place in range(3))
    cut = text_size(index, 2, Extent(np.full(3, 9)), tokenizer).bytes
    assert both == size and abs(early + late - size) <= 1 and cut == early
    assert 0 < early < late

"""A tiny corpus whose tokens are their own positions, and readers of it, for the tests of the lanes."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_mem.config import DataConfig
from dist_mem.data.batch import Batch, Update
from dist_mem.data.lanes import LaneReader
from dist_mem.data.plan import cut_lengths, lanes_of_rank, make_plan
from dist_mem.data.shard import Index, TokenizedDocument, write_split
from tests.support.faults import flip

SEG_LEN = 4
BOS = 60_000
LENGTHS = [9, 0, 3, 30, 1, 4, 8, 17, 2, 5, 12]
LAYOUTS = ["documents", "stream"]


def make_split(
    folder: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    with_extras: bool = False,
    dtype: type = np.uint16,
    tokenizer_fingerprint: str = "f",
    **options: Any,
) -> Index:
    """Write documents whose tokens are their positions in the corpus, so that a token identifies its origin.

    `with_extras`: every third document has a mask without its even tokens, every second recall distances 0, 1, 2, ...
    """
    starts = np.cumsum([0, *lengths])
    documents = [
        TokenizedDocument(
            id=f"d{number}",
            title=f"Document {number}",
            year=None,
            words=length,
            bytes=length,
            tokens=np.arange(starts[number], starts[number + 1], dtype=dtype),
            mask=np.arange(length) % 2 == 1 if with_extras and number % 3 == 0 else None,
            recall=np.arange(length, dtype=np.int32) if with_extras and number % 2 == 0 else None,
        )
        for number, length in enumerate(lengths)
    ]
    fingerprint = tokenizer_fingerprint
    return write_split(documents, folder, name="tiny", split="train", tokenizer_fingerprint=fingerprint, **options)


def damage(index: Index, document: int) -> None:
    """Flip a bit in the middle of a document's tokens."""
    entry = index.documents[document]
    flip(index.split_dir / entry.shard, entry.tokens_offset + entry.num_tokens, 4)


@contextmanager
def reader_of(
    index: Index,
    *,
    num_lanes: int = 3,
    world_size: int = 1,
    rank: int = 0,
    micro_lanes: int = 1,
    segments_per_update: int = 1,
    cursors: Tensor | None = None,
    **data: Any,
) -> Iterator[LaneReader]:
    config = DataConfig(**data)
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], config.max_document_len)
    plan = make_plan(
        lengths, num_lanes=num_lanes, seg_len=SEG_LEN, seed=config.seed, layout=config.layout, cut=config.cut
    )
    reader = LaneReader(
        config,
        index,
        plan,
        lane_ids=lanes_of_rank(num_lanes, world_size, rank, micro_lanes),
        micro_lanes=micro_lanes,
        segments_per_update=segments_per_update,
        bos_id=BOS,
        cursors=cursors,
    )
    with closing(reader):
        yield reader


def first_updates(index: Index, count: int, **options: Any) -> list[Update]:
    with reader_of(index, **options) as reader:
        return list(islice(reader, count))


def assert_equal_batches(first: Batch, second: Batch) -> None:
    for name, one, other in zip(Batch._fields, first, second, strict=True):
        assert one is other if one is None or other is None else torch.equal(one, other), name


def assert_equal_updates(first: Update, second: Update) -> None:
    for one, other in zip(first.batches, second.batches, strict=True):
        assert_equal_batches(one, other)
    assert torch.equal(first.cursors, second.cursors)
    assert first[2:] == second[2:]

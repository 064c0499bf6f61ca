"""Batches equal those that the block reader of November 2026 gave, bit for bit, in every field of an update.

A run that goes on under another version, or under another numpy, reads what it would have read: the deal of the
documents to the lanes is recorded with them. That batches are right for any corpus, test_lanes.py says.
"""

import hashlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from dist_mem.data.batch import Update
from dist_mem.data.shard import read_index
from tests.support.lane_corpus import damage, first_updates, make_split

RAGGED = np.random.default_rng(7).integers(0, 41, 40).tolist()  # some empty, some of one token, few multiples of T
ALONE: dict[str, Any] = {"num_lanes": 1}
SEVERAL: dict[str, Any] = {"num_lanes": 5, "micro_lanes": 2, "segments_per_update": 3, "seed": 2}
LAST_RANK: dict[str, Any] = {"num_lanes": 4, "micro_lanes": 2, "world_size": 3, "rank": 1, "seed": 3}
RECORDED: list[tuple[dict[str, Any], str]] = [
    (ALONE, "c3155cba02d08daf"),
    (SEVERAL, "47602030b4e5cf98"),
    (LAST_RANK, "6d4a6e8d77d57f27"),
    ({**SEVERAL, "cut": "end"}, "c7718ef055ce5851"),
    ({**SEVERAL, "cut": "end", "blocks": True, "max_document_len": 7}, "a9c329c36d4b7fed"),
    ({**SEVERAL, "layout": "stream"}, "af4e0291978b96ec"),
    ({**LAST_RANK, "layout": "stream", "blocks": True}, "6065b1c1186322af"),
]


def digest_of(updates: Iterable[Update]) -> str:
    digest = hashlib.sha256()
    for update in updates:
        for value in (*chain(*update.batches), *update[1:]):
            if isinstance(value, Tensor):
                digest.update(repr((value.dtype, value.shape)).encode() + value.contiguous().numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(("options", "recorded"), RECORDED, ids=lambda value: " ".join(value))
def test_batches_equal_the_recorded_ones(tmp_path: Path, options: dict[str, Any], recorded: str) -> None:
    """Three documents are damaged, and 300 updates are several epochs."""
    index = make_split(tmp_path, RAGGED, with_extras=True)
    for number in (3, 8, 21):
        damage(index, number)
    assert digest_of(first_updates(read_index(tmp_path), 300, on_corrupt="skip", **options)) == recorded

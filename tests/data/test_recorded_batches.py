"""Batches equal those that the block reader of November 2026 gave, bit for bit: all layouts, resumes, damage, ends.

`tests/golden/lanes.json` has a SHA-256 of every case, recorded before a reader of single segments replaced the reader
of blocks; it covers every field of an update, types included. The command that records it again:

    python -m tests.data.test_recorded_batches
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import Batch, Update
from dist_mem.data.lanes import evaluation_batches, stream_batches
from dist_mem.data.plan import StreamPlan, cut_lengths, evaluation_plan, lanes_of_rank
from dist_mem.data.shard import Index, read_index
from tests.support.lane_corpus import BOS, LENGTHS, SEG_LEN, damage, first_updates, make_split
from tests.support.paths import ROOT

RECORDED = ROOT / "tests" / "golden" / "lanes.json"
RAGGED = np.random.default_rng(7).integers(0, 41, 40).tolist()  # some empty, some of one token, few multiples of T
CORPORA: dict[str, dict[str, Any]] = {
    "plain": {"lengths": LENGTHS, "dtype": np.uint32},
    "ragged": {"lengths": RAGGED, "with_extras": True},
    "damaged": {"lengths": RAGGED, "with_extras": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {"start": {}, "end": {"cut": "end"}, "stream": {"layout": "stream"}}
DIVISIONS: list[dict[str, int]] = [
    {"num_lanes": 1},
    {"num_lanes": 3, "segments_per_update": 2},
    {"num_lanes": 5, "micro_lanes": 2, "segments_per_update": 3},
    {"num_lanes": 4, "micro_lanes": 2, "world_size": 3},
]
COUNT = 48  # updates of a case: several epochs of most, and more than the block reader read at once


def digest_of(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
        else:
            digest.update((value.hex() if isinstance(value, float) else repr(value)).encode())
    return digest.hexdigest()


def update_values(updates: Iterable[Update]) -> Iterator[Any]:
    for update in updates:
        for batch in update.batches:
            yield from batch
        yield from (update.cursors, update.num_scored, update.epoch)
        yield from (update.documents_started, update.documents_skipped, update.num_recall)


def training_digest(index: Index, division: dict[str, int], **data: Any) -> str:
    """Digest the updates of all ranks, from the beginning and resumed at some of them."""
    values: list[Any] = []
    for rank in range(division.get("world_size", 1)):
        updates = first_updates(index, COUNT, rank=rank, **division, **data)
        values += update_values(updates)
        for before in updates[::9]:
            values += update_values(first_updates(index, 5, rank=rank, cursors=before.cursors, **division, **data))
    return digest_of(values)


def evaluation_digest(index: Index, division: dict[str, int], *, max_document_len: int | None, **data: Any) -> str:
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    world_size, micro_lanes = division.get("world_size", 1), division.get("micro_lanes", 1)
    num_lanes, blocks = division["num_lanes"], data["blocks"]
    values: list[Any] = []
    for rank in range(world_size):
        if data.get("layout") == "stream":
            lane_ids = lanes_of_rank(num_lanes, world_size, rank, micro_lanes)
            plan = StreamPlan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
            steps: Any = stream_batches(
                index, plan, lane_ids=lane_ids, micro_lanes=micro_lanes, bos_id=BOS, blocks=blocks
            )
        else:
            lanes = evaluation_plan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
            steps = evaluation_batches(
                index, lanes, world_size=world_size, rank=rank, micro_lanes=micro_lanes, seg_len=SEG_LEN, bos_id=BOS,
                max_document_len=max_document_len, blocks=blocks, cut=data.get("cut", "start"),
            )  # fmt: skip
        for step in steps:
            for part in step:
                values += part if isinstance(part, Batch) else [*part[0], part[1]]
    return digest_of(values)


def make_corpus(folder: Path, name: str) -> Index:
    index = make_split(folder, max_shard_bytes=100, **CORPORA[name])
    if name == "damaged":
        for number in (3, 8, 21):
            damage(index, number)
        (folder / index.shards[2].name).unlink()
    return read_index(folder)


def corpus_digests(folder: Path, name: str) -> dict[str, str]:
    """Return case -> digest of one corpus."""
    index = make_corpus(folder, name)
    digests = {}
    for (cut, layout), blocks, max_len, (number, division) in product(
        LAYOUTS.items(), (False, True), (None, 7), enumerate(DIVISIONS)
    ):
        case = f"{name} {cut} {'blocks ' if blocks else ''}{'short ' if max_len else ''}{number}"
        data = {**layout, "blocks": blocks, "max_document_len": max_len}
        if name == "damaged":
            digests[case] = training_digest(index, division, **data, on_corrupt="skip")
        else:
            digests[case] = training_digest(index, division, **data, seed=number)
            digests[f"{case} evaluation"] = evaluation_digest(index, division, **data)
    return digests


@pytest.mark.parametrize("name", CORPORA)
def test_batches_equal_the_recorded_ones(tmp_path: Path, name: str) -> None:
    recorded = {case: digest for case, digest in json.loads(RECORDED.read_text()).items() if case.split()[0] == name}
    found = corpus_digests(tmp_path, name)
    assert found.keys() == recorded.keys()
    changed = [case for case in found if found[case] != recorded[case]]
    assert not changed, f"{len(changed)} of {len(found)} cases differ from {RECORDED}: {changed[:8]}"


def record() -> None:
    digests: dict[str, str] = {}
    for name in CORPORA:
        with tempfile.TemporaryDirectory() as folder:
            digests |= corpus_digests(Path(folder), name)
    RECORDED.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()

"""Blocks: the next K segments of every lane of a rank, written lane by lane and read step by step as micro-batches.

A lane's runs (spans.py) are written into its column, each array in one operation for many segments. The remaining cost
is moving memory. So one block is filled again and again, its integers are half as wide as those of a Batch, and a Batch
is copied out only when it is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.spans import DocumentLane, Run, StreamLane

COUNTS = ("documents_started", "documents_skipped", "num_scored", "num_recall")  # as in Update


class Block(NamedTuple):
    """K segments of each of P lanes, step first; the first six fields are those of Batch, in its order."""

    tokens: np.ndarray  # (K, P, T) int32
    targets: np.ndarray  # (K, P, T) int32
    valid_len: np.ndarray  # (K, P) int32
    is_new_document: np.ndarray  # (K, P) bool
    document: np.ndarray  # (K, P) int32
    recall: np.ndarray | None  # (K, P, T) int32
    cursors: np.ndarray  # (K, P, 3) int64, position of each lane after the segment
    epochs: np.ndarray  # (K, P) float64, epochs that each lane has completed after the segment
    counts: np.ndarray  # (K, P, 4) int64, COUNTS of each segment


def new_block(num_steps: int, num_lanes: int, seg_len: int, *, with_recall: bool) -> Block:
    """Return a block in which every lane is idle."""
    shape = (num_steps, num_lanes)
    return Block(
        tokens=np.zeros((*shape, seg_len), dtype=np.int32),
        targets=np.full((*shape, seg_len), IGNORE, dtype=np.int32),
        valid_len=np.zeros(shape, dtype=np.int32),
        is_new_document=np.zeros(shape, dtype=bool),
        document=np.full(shape, -1, dtype=np.int32),
        recall=np.zeros((*shape, seg_len), dtype=np.int32) if with_recall else None,
        cursors=np.zeros((*shape, 3), dtype=np.int64),
        epochs=np.zeros(shape),
        counts=np.zeros((*shape, len(COUNTS)), dtype=np.int64),
    )


def fill_block(
    block: Block, lanes: Sequence[DocumentLane | StreamLane], *, num_steps: int, own_inputs: bool = False
) -> None:
    """Read the next `num_steps` segments of each lane into its column; columns beyond the lanes remain idle.

    Args:
        own_inputs: `data.blocks`: the inputs of a segment are its tokens, not each target's predecessor.
    """
    for column, lane in enumerate(lanes):
        step = 0
        while step < num_steps:
            run = lane.read(num_steps - step)
            _write(block, run, step=step, column=column, own_inputs=own_inputs)
            step += len(run.cursors)


def batch_views(block: Block, *, micro_lanes: int) -> list[Batch]:
    """Return Batches that share the block's memory: the lane groups of the first step, then of the second, ..."""
    parts = [
        repeat(None) if part is None else torch.from_numpy(part).view(-1, micro_lanes, *part.shape[2:]).unbind()
        for part in block[: len(Batch._fields)]
    ]
    return [Batch(*fields) for fields in zip(*parts, strict=False)]


def copy_batch(view: Batch) -> Batch:
    """Copy a batch of `batch_views`, with the dtypes of a Batch."""
    return Batch._make(
        None if part is None else part.clone() if part.dtype == torch.bool else part.long() for part in view
    )


def _write(block: Block, run: Run, *, step: int, column: int, own_inputs: bool) -> None:
    """Write a run into a column from `step` on."""
    num_segments, seg_len = len(run.cursors), block.tokens.shape[2]
    part = Block._make(None if array is None else array[step : step + num_segments, column] for array in block)
    inputs, targets = run.tokens[1:] if own_inputs else run.tokens[:-1], run.tokens[1:]
    if run.scored is not None:
        targets = np.where(run.scored, targets, np.int32(IGNORE))
    _write_tokens(part.tokens, inputs, padding=0)
    _write_tokens(part.targets, targets, padding=IGNORE)
    if own_inputs:
        _move_left(part.targets, padding=IGNORE)
    part.valid_len[:] = seg_len
    part.valid_len[-1] = len(inputs) - (num_segments - 1) * seg_len
    part.is_new_document[:] = False
    part.is_new_document[0] = run.is_new_document
    part.document[:], part.cursors[:], part.epochs[:] = run.document, run.cursors, run.epochs
    part.counts[:, :2] = run.counts
    all_scored = part.valid_len - int(own_inputs)
    part.counts[:, 2] = all_scored if run.scored is None else (part.targets != IGNORE).sum(axis=1)
    if part.recall is not None:
        _write_tokens(part.recall, np.zeros_like(inputs) if run.recall is None else run.recall, padding=0)
        if own_inputs:
            _move_left(part.recall, padding=0)
        part.counts[:, 3] = ((part.recall > 0) & (part.targets != IGNORE)).sum(axis=1)


def _write_tokens(rows: np.ndarray, values: np.ndarray, *, padding: int) -> None:
    """Fill rows (R, T) with n values, one after another, and the rest of the last row with padding."""
    whole, rest = divmod(len(values), rows.shape[1])
    rows[:whole] = values[: len(values) - rest].reshape(whole, rows.shape[1])
    if rest:
        rows[whole, :rest] = values[len(values) - rest :]
        rows[whole, rest:] = padding


def _move_left(rows: np.ndarray, *, padding: int) -> None:
    """Shift every row (R, T) left by one: the value of a token moves to the token before it in its segment."""
    rows[:, :-1] = rows[:, 1:]
    rows[:, -1] = padding

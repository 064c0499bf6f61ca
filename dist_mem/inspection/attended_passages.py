"""Where each token's layers looked in the memory: the passages that were read most.

Shape letters: N tokens of the document, K passages per token, B = 1 lane, T segment, R rows, U different spans,
H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.inspection.walk import SegmentReading
from dist_mem.memory.parts.inspection import SEGMENT, Inspection, Rows, Spans


class AttendedPassages(NamedTuple):
    """Where one layer looked in its rows of one kind, per token of the document; masses are means over the heads.

    The rows of token t are those of the query that predicts it. All is 0 for a token that is not scored.
    """

    mass: Tensor  # (N,) float32, on all rows of the kind
    begin: Tensor  # (N, K) int32, position of each passage's first token, the most read passage first; -1: BOS
    end: Tensor  # (N, K) int32, after its last token; begin = end: there are fewer than K passages
    shares: Tensor  # (N, K) float32, the mass on each passage


def attend_nowhere(num_tokens: int, top: int) -> AttendedPassages:
    """Return what is known before anything is read."""
    places = torch.zeros(2, num_tokens, top, dtype=torch.int32)
    return AttendedPassages(torch.zeros(num_tokens), places[0], places[1], torch.zeros(num_tokens, top))


def memory_rows(layer: Inspection) -> Mapping[str, Rows]:
    """Return the rows of a layer that are of the past."""
    return {kind: rows for kind, rows in layer.rows.items() if kind != SEGMENT}


def put_looked(looked: AttendedPassages, step: SegmentReading, rows: Rows) -> None:
    """Write where the queries of a step's scored targets looked into `looked`, in place."""
    first, number = step.first_input + 1, min(step.num_inputs, len(looked.mass) - step.first_input - 1)
    mass, spans = mass_by_span(rows, number, step.first_input)
    mass = mass.masked_fill((step.batch.targets[0, :number, None] == IGNORE).cpu(), 0.0)
    chosen = mass.topk(min(looked.shares.shape[1], mass.shape[1]), dim=1)
    here, num_passages = slice(first, first + number), chosen.values.shape[1]
    looked.mass[here] = mass.sum(dim=1)
    looked.shares[here, :num_passages] = chosen.values
    for target, source in zip((looked.begin, looked.end), spans, strict=True):
        target[here, :num_passages] = torch.where(chosen.values > 0.0, source[chosen.indices], 0).int()


def mass_by_span(rows: Rows, num_queries: int, first_input: int) -> tuple[Tensor, Spans]:
    """Return the mass of the first queries on the rows of each span, (num_queries, U), the mean over the heads.

    The spans, (U,) int64, have positions in the document; rows that came from the same tokens are one.
    """
    weights = rows.weights[:, 0, :num_queries].mean(dim=0).float().cpu()
    spans = torch.stack([rows.spans.begin[0], rows.spans.end[0]], dim=1).cpu() + first_input
    different, place = torch.unique(spans, dim=0, return_inverse=True)
    mass = torch.zeros(len(weights), len(different)).index_add_(1, place, weights)
    return mass, Spans(different[:, 0], different[:, 1])


def mass_in(mass: Tensor, spans: Spans, begin: Tensor, end: Tensor) -> Tensor:
    """Return the mass in each range of positions [begin, end), (number,): (num_queries, number).

    The mass on a span that lies in several ranges is divided among them by their shares of its tokens.
    """
    overlap = torch.minimum(spans.end[:, None], end) - torch.maximum(spans.begin[:, None], begin)
    return mass @ (overlap.clamp(min=0) / (spans.end - spans.begin).clamp(min=1)[:, None])

"""Read one passage at every evaluation of a training, and log what the memory read of it and what it gained.

The passage is the beginning of one validation document, always the same, so that its metrics can be compared between
steps and runs. Every rank reads it, because ZeRO-3 needs every rank in a forward; they all get the same metrics, which
are comparable between memories. A picture shows where each layer looked, by age.
Shape letters: B lanes, T segment, R rows, H heads, D model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Documents
from dist_mem.data.segments import collate, document_segments
from dist_mem.data.shard import Index
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table, write_figure
from dist_mem.evaluation.plotting.style import new_picture, ordered_styles, use_style
from dist_mem.evaluation.protocol import Protocol
from dist_mem.evaluation.scoring import Forward, InitState
from dist_mem.memory.base import Memory, MemoryState, named_tensors
from dist_mem.memory.parts.inspection import SEGMENT, SIGNAL, SUMMARY, Inspection, Rows
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import empty_memories

PREFIX = "memory/"  # of the metrics


class PassageRead(NamedTuple):
    """What the memory read of the passage, and gained."""

    metrics: dict[str, float]  # by the names they are logged under
    layers: list[dict[str, float]]  # `mass_by_age` of every layer, the mean over segments


def open_passage(index: Index, protocol: Protocol, *, num_segments: int, bos_id: int) -> list[Batch]:
    """Return the segments of the passage, at most so many (`eval.passage`), one lane each.

    They are the first ones of the first document that has enough, or of the longest; an incomplete one is left out.
    With `data.cut: end` the document is read as if it ended there.

    Raises:
        ShardError: the document is damaged or cannot be read.
    """
    seg_len, length = protocol.seg_len, num_segments * protocol.seg_len
    lengths = np.minimum(index.documents.num_tokens, length) // seg_len * seg_len
    number = int(np.argmax(lengths))
    if not lengths[number]:
        return []
    document = Documents(index, lengths, bos_id=bos_id).open(number)
    segments = document_segments(document, seg_len=seg_len, bos_id=bos_id)
    return [collate([segment], seg_len=seg_len, with_recall=False, blocks=protocol.blocks) for segment in segments]


@torch.no_grad()
def passage_metrics(
    forward: Forward, init_state: InitState, memories: Sequence[Memory], batches: Sequence[Batch], device: torch.device
) -> PassageRead:
    """Read a passage and return its metrics; there are none for one without segments.

    `memory/gain` is in nats per scored token: the loss with the memory emptied before every segment, less that with it.
    There is none in a passage of which no token is scored, as the beginning of a recall task.

    Args:
        forward, init_state: as for `scoring.score_split`; every rank calls it.
        memories: those of the model that `forward` computes, which are inspected in it.
    """
    if not batches:
        return PassageRead({}, [])
    state = init_state(batches[0].document)
    metrics: dict[str, list[float]] = {}
    by_layer: list[dict[str, float]] = [{} for _ in memories]
    inspector = Inspector(memories)
    gain, num_scored = 0.0, 0
    for batch in (host_batch.to(device) for host_batch in batches):
        tensors = batch.tokens, batch.targets, batch.valid_len
        emptied = forward(*tensors, state=empty_memories(state, init_state(batch.document)))
        with inspector:
            output = forward(*tensors, state=state)
        inspector.commit()
        state = output.state
        gain += float(emptied.nll.double().sum() - output.nll.double().sum())
        num_scored += int((batch.targets != IGNORE).sum())
        read = mass_by_age(inspector.layers, batch.valid_len, seg_len=batch.tokens.shape[1])
        for name, metric in (read | mean_values(inspector.layers)).items():
            metrics.setdefault(name, []).append(metric)
        for mean, layer in zip(by_layer, inspector.layers, strict=True):
            for name, mass in mass_by_age([layer], batch.valid_len, seg_len=batch.tokens.shape[1]).items():
                mean[name] = mean.get(name, 0.0) + mass / len(batches)
    means = {name: statistics.fmean(several) for name, several in metrics.items()}
    means |= {"gain": gain / num_scored} if num_scored else {}
    by_block = zip(state.blocks, (memory.rows_dim for memory in memories), strict=True)
    held = state_metrics(by_block) or state_metrics([(state.stem, -2)])  # memory tokens are held for the whole model
    named = {PREFIX + name: metric for name, metric in (means | held).items()}
    return PassageRead(named, by_layer)


# Age of what is read, in segments back: the name of a band, its first and its last segment.
BANDS = (("1", 1, 1), ("2", 2, 2), ("3_to_4", 3, 4), ("5_to_8", 5, 8), ("9_to_16", 9, 16), ("17_up", 17, 1 << 40))


def mass_by_age(layers: Iterable[Inspection], valid_len: Tensor, *, seg_len: int) -> dict[str, float]:
    """Return the share of attention that goes to the memory, and to each band of ages; the same of a signal.

    The mean over layers that have such rows, heads, and the real queries of all lanes. A row's age is that of its
    newest token, so the bands of `attention` sum to the attention on rows of tokens; `summary` is that on rows that
    summarise all the past, which have no age.
    """
    found: dict[str, list[Tensor]] = {}
    for layer in layers:
        parts = {
            "attention": [rows for kind, rows in layer.rows.items() if kind not in (SEGMENT, SUMMARY, SIGNAL)],
            **{name: [layer.rows[name]] for name in (SUMMARY, SIGNAL) if name in layer.rows},
        }
        for name, several in parts.items():
            if several:
                found.setdefault(name, []).append(sum((_by_band(rows, valid_len, seg_len) for rows in several), _ZERO))
    means = {name: torch.stack(masses).mean(dim=0).tolist() for name, masses in found.items()}
    by_band = {
        f"{name}_{band}": mass
        for name, masses in means.items()
        if name != SUMMARY
        for (band, _, _), mass in zip(BANDS, masses, strict=True)
    }
    return {name: math.fsum(masses) for name, masses in means.items()} | by_band


_ZERO = torch.zeros(len(BANDS), dtype=torch.float64)


def _by_band(rows: Rows, valid_len: Tensor, seg_len: int) -> Tensor:
    """Return the mass of the rows of each band, the mean over heads and real queries: (bands,) float64 on the CPU."""
    weights, (begin, end) = rows
    real = torch.arange(weights.shape[2], device=weights.device) < valid_len[:, None]
    mass = torch.where(real[..., None], weights, 0.0).double().sum(dim=(0, 2))  # (B, R)
    age = (-end).div(seg_len, rounding_mode="floor") + 1  # token -1 is one segment back
    number = weights.shape[0] * valid_len.sum().clamp(min=1)
    bands = [torch.where((age >= first) & (age <= last) & (begin < end), mass, 0.0).sum() for _, first, last in BANDS]
    return (torch.stack(bands) / number).cpu()


def mean_values(layers: Iterable[Inspection]) -> dict[str, float]:
    """Return the means of the values that a memory gives per lane or row: alpha, regression_error, compression_loss.

    Those that are nan have no meaning and do not count.
    """
    found: dict[str, list[float]] = {}
    for layer in layers:
        for name in ("alpha", "regression_error", "compression_loss"):
            mean = float(layer.values[name].float().nanmean()) if name in layer.values else math.nan
            if not math.isnan(mean):
                found.setdefault(name, []).append(mean)
    return {name: statistics.fmean(values) for name, values in found.items()}


def state_metrics(states: Iterable[tuple[MemoryState, int]]) -> dict[str, float]:
    """Return the mean norm of the rows that states hold, and the effective rank of the largest tensor of each.

    The effective rank is the exponential of the entropy of the singular values over their sum (Roy and Vetterli 2007,
    "The effective rank"): 1 if all rows are multiples of one, their width at most. Where every head has rows of its
    own, it is the mean over heads.

    Args:
        states: with the dimension along which rows stand, `Memory.rows_dim`.
    """
    norms, ranks = [], []
    for state, rows_dim in states:
        matrices = _held_matrices(named_tensors(state), rows_dim)
        if matrices is None:
            continue
        lengths = matrices.norm(dim=-1)
        norms.append(float(lengths[lengths > 0.0].mean()))
        singular = torch.linalg.svdvals(matrices)
        shares = singular / singular.sum(dim=-1, keepdim=True)
        ranks.append(float(torch.special.entr(shares).sum(dim=-1).exp().mean()))
    if not norms:
        return {}
    return {"state_norm": statistics.fmean(norms), "effective_rank": statistics.fmean(ranks)}


def _held_matrices(tensors: Mapping[str, Tensor], rows_dim: int) -> Tensor | None:
    """Return the largest tensor of rows, of each lane and head (matrices, rows, width) float32, without empty matrices.

    None: nothing is held.
    """
    floats = [part for part in tensors.values() if part.is_floating_point() and part.dim() >= 3]
    if not floats:
        return None
    matrices = max(floats, key=Tensor.numel).movedim(rows_dim, -2).flatten(0, -3).float()
    held = matrices[matrices.abs().amax(dim=(-2, -1)) > 0.0]
    return held if len(held) else None


_TITLES = {"attention": "attention to stored rows", SIGNAL: "mass on the signal"}


def write_passage_picture(layers: Sequence[Mapping[str, float]], folder: Path, *, step: int) -> list[Path]:
    """Write picture, numbers and caption into the folder; return their paths, none if no layer reads a memory.

    Args:
        layers: `measures.mass_by_age` of every layer.
    """
    kinds = [kind for kind in _TITLES if any(kind in layer for layer in layers)]
    if not kinds:
        return []
    rows = [
        (number, kind, band, layer.get(f"{kind}_{band}", 0.0))
        for number, layer in enumerate(layers, start=1)
        for kind in kinds
        for band, _, _ in BANDS
    ]
    with use_style():
        picture, axes = new_picture(2.8, columns=len(kinds), squeeze=False, sharey=True)
        names = [band.replace("_to_", "-").replace("_up", "+") for band, _, _ in BANDS]
        for (column,), kind in zip(axes.T, kinds, strict=True):
            for number, style in enumerate(ordered_styles(len(layers)), start=1):
                shares = [share for layer, of, _, share in rows if (layer, of) == (number, kind)]
                column.plot(names, shares, marker="o", markersize=3, label=f"layer {number}", **style)
            column.set_title(_TITLES[kind])
            column.set_xlabel("age (segments back)")
        axes[0, 0].set_ylabel("share of a query's reading")
        axes[0, 0].legend()
        caption = (
            f"Where each layer looked at step {step}, in the passage that every evaluation reads: the mean share of a "
            "query's reading by the age of what is read, over heads, queries and segments."
        )
        drawn = DrawnFigure(picture, Table(("layer", "reading", "segments_back", "share"), rows), caption)
        return write_figure(drawn, folder, f"passage-step-{step:08d}", form="svg")

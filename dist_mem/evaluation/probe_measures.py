"""Figures of what memories read and hold, as scalars that are comparable between memories.

Shape letters: B lanes, T segment, R rows, H heads, D model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dist_mem.memory.base import MemoryState, named_tensors
from dist_mem.memory.parts.inspection import SEGMENT, SIGNAL, SUMMARY, Inspection, Rows

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
    return {name: sum(masses) for name, masses in means.items()} | by_band


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
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def state_figures(blocks: Iterable[MemoryState]) -> dict[str, float]:
    """Return the mean norm of the rows that states hold, and the effective rank of the largest tensor of each block.

    The effective rank is the exponential of the entropy of the singular values over their sum (Roy and Vetterli 2007,
    "The effective rank"): 1 if all rows are multiples of one, D at most.
    """
    norms, ranks = [], []
    for block in blocks:
        rows = _rows(named_tensors(block))
        if rows is None:
            continue
        norms.append(float(rows.norm(dim=-1).mean()))
        singular = torch.linalg.svdvals(rows)
        shares = singular / singular.sum()
        ranks.append(math.exp(float(torch.special.entr(shares).sum())))
    if not norms:
        return {}
    return {"state_norm": math.fsum(norms) / len(norms), "effective_rank": math.fsum(ranks) / len(ranks)}


def _rows(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the rows that are not 0 of the largest tensor of rows, (rows, D) float32; None: nothing is held."""
    matrices = [part.flatten(2) for part in tensors.values() if part.is_floating_point() and part.dim() >= 3]
    if not matrices:
        return None
    rows = max(matrices, key=Tensor.numel).flatten(0, 1).float()
    held = rows[rows.abs().amax(dim=-1) > 0.0]
    return held if len(held) else None

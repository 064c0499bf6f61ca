"""Plain or adaptive embedding and softmax, from token ids to vectors and back.

The vocabulary is cut into bins [0, c0), [c0, c1), ..., [c_last, V), frequent tokens first; a plain one is one bin. Bin
i has width d_embed / div_val**i (Grave et al. 2017, Baevski & Auli 2019, as in the authors' Transformer-XL code).
Losses are in token order; the published softmax groups them by bin by default. Shape letters: B lanes, T segment, R =
B * T rows, D model, V vocabulary.

Every bin runs in every step, on a masked row if no target is in it: under ZeRO all ranks must use the same parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from dist_mem.data.batch import IGNORE
from dist_mem.nn.cross_entropy import Weights, compute_logits, full_precision, linear_cross_entropy, row_chunks


@dataclass(frozen=True)
class Bin:
    """A range of token ids and the width of their vectors."""

    start: int
    stop: int
    width: int
    projected: bool  # a matrix of this bin maps between the width and D
    tie_projection: bool  # embedding and softmax use the same matrix

    @property
    def size(self) -> int:
        return self.stop - self.start

    def holds(self, tokens: Tensor) -> Tensor:
        """Return which tokens are in the bin, bool of the same shape."""
        return (tokens >= self.start) & (tokens < self.stop)


def plain_bin(vocab_size: int, *, d_model: int, d_embed: int) -> list[Bin]:
    """Return the single bin of a plain vocabulary."""
    return [Bin(0, vocab_size, d_embed, d_embed != d_model, True)]


def adaptive_bins(
    vocab_size: int, *, d_model: int, d_embed: int, cutoffs: list[int], div_val: int, tie_projections: list[bool] | None
) -> list[Bin]:
    """Return the bins of an adaptive vocabulary; with div_val > 1 all bins are projected, the first too, as published.

    Raises:
        ValueError: the cutoffs do not grow, a bin has width 0, or the number of `tie_projections` is wrong.
    """
    edges = [0, *cutoffs, vocab_size]
    if not cutoffs or any(low >= high for low, high in pairwise(edges)):
        raise ValueError(f"model.adaptive.cutoffs is {cutoffs}, but must be growing numbers from 1 to {vocab_size - 1}")
    widths = [d_embed // div_val**index for index in range(len(edges) - 1)]
    if div_val < 1 or widths[-1] < 1:
        raise ValueError(
            f"model.adaptive.div_val = {div_val} leaves no width for bin {len(widths) - 1} of d_embed {d_embed}"
        )
    ties = tie_projections if tie_projections is not None else [True] * len(widths)
    if len(ties) != len(widths):
        raise ValueError(
            f"model.adaptive.tie_projections has {len(ties)} flags for {len(widths)} bins; give one for each bin"
        )
    projected = div_val > 1 or d_embed != d_model
    return [
        Bin(start, stop, width, projected, tie)
        for (start, stop), width, tie in zip(pairwise(edges), widths, ties, strict=True)
    ]


class BinEmbedding(nn.Module):
    """Embedding of one bin, projected to D."""

    def __init__(self, part: Bin, *, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(part.size, part.width))
        self.projection = nn.Parameter(torch.zeros(d_model, part.width)) if part.projected else None

    def forward(self, index: Tensor) -> Tensor:
        vectors = F.embedding(index, self.weight)
        return vectors if self.projection is None else F.linear(vectors, self.projection)


class Embedding(nn.Module):
    """Map token ids (B, T) to vectors (B, T, D), scaled by sqrt(D)."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__()
        self.spans = bins
        self.scale = math.sqrt(d_model)
        self.bins = nn.ModuleList(BinEmbedding(part, d_model=d_model) for part in bins)

    def forward(self, tokens: Tensor, *, places: Tensor | None = None) -> Tensor:
        """Embed tokens (B, T); `places` (B, T) int64 in their segments, for embeddings of positions; None: 0, 1, ..."""
        if len(self.spans) == 1:
            return self.bins[0](tokens) * self.scale
        # Every bin embeds every token and is then masked: a few more products, but no data-dependent shapes.
        parts = []
        for part, embed in zip(self.spans, self.bins, strict=True):
            vectors = embed((tokens - part.start).clamp(0, part.size - 1))
            parts.append(vectors * part.holds(tokens).unsqueeze(-1))
        return torch.stack(parts).sum(0) * self.scale


class BinLogits(nn.Module):
    """Logits of one bin; the first bin of an adaptive vocabulary also scores the others, in `num_clusters` columns."""

    def __init__(self, part: Bin, *, d_model: int, num_clusters: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(part.size, part.width))
        self.bias = nn.Parameter(torch.zeros(part.size))
        self.projection = nn.Parameter(torch.zeros(d_model, part.width)) if part.projected else None
        self.cluster_weight = nn.Parameter(torch.zeros(num_clusters, part.width)) if num_clusters else None
        self.cluster_bias = nn.Parameter(torch.zeros(num_clusters)) if num_clusters else None

    def tie(self, embedding: BinEmbedding, *, projection: bool) -> None:
        """Use the embedding's table and, with `projection`, its projection; biases stay separate, as published."""
        self.weight = embedding.weight
        if projection:
            self.projection = embedding.projection

    def forward(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return logits (R, V) of hidden (R, D); or if given the `columns` (R,) of the targets, the losses (R,)."""
        if self.projection is not None:
            hidden = hidden @ self.projection
        weights: Weights = ((self.weight, self.bias),)
        if self.cluster_weight is not None:
            weights += ((self.cluster_weight, self.cluster_bias),)
        return compute_logits(hidden, weights) if columns is None else linear_cross_entropy(hidden, columns, weights)


def few_scored(targets: Tensor) -> Tensor | None:
    """Return the indices of the rows with a target, at least one, if they are fewer than half of targets (R,).

    Logits of the others, as in a document that ends with one answer, would be computed for nothing. None for all rows,
    on a GPU, where the host would have to wait for their number, and of tensors without values.
    """
    if not targets.is_cpu or is_fake(targets):
        return None
    scored = (targets.numpy() != IGNORE).nonzero()[0]
    if 2 * len(scored) >= len(targets):
        return None
    return torch.from_numpy(scored) if len(scored) else torch.zeros_like(targets[:1])


class TokenScores(NamedTuple):
    nll: Tensor  # (B, T) float32 at least, nats; 0 where the target is IGNORE
    hits: Tensor | None  # (B, T) bool, the target is the most probable token; None in training, for speed


class Softmax(nn.Module):
    """Map hidden vectors and targets to negative log-likelihoods in nats, and whether the target is most probable."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__()
        self.spans = bins
        self.bins = nn.ModuleList(
            BinLogits(part, d_model=d_model, num_clusters=len(bins) - 1 if index == 0 else 0)
            for index, part in enumerate(bins)
        )

    def tie(self, embedding: Embedding) -> None:
        """Use the embedding's tables, and its projections where they are tied."""
        for part, logits, embed in zip(self.spans, self.bins, embedding.bins, strict=True):
            cast(BinLogits, logits).tie(cast(BinEmbedding, embed), projection=part.tie_projection)

    def forward(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        """Score hidden (B, T, D) against targets (B, T) int64, which are IGNORE where nothing is scored."""
        rows, row_targets = hidden.flatten(0, 1), targets.flatten()
        if self.training:
            return TokenScores(self.scored_losses(rows, row_targets).view_as(targets), None)
        num_columns = self.spans[0].size + len(self.spans) - 1
        columns = max(num_columns, *(part.size for part in self.spans))
        chunks = row_chunks(rows, columns)
        scores = [self.simple_scores(rows[chunk], row_targets[chunk]) for chunk in chunks]
        return TokenScores(*(torch.cat(parts).view_as(targets) for parts in zip(*scores, strict=True)))

    def scored_losses(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Compute `losses` of the rows with a target alone where they are few, and 0 for the others.

        Evaluation computes all: with other numbers of rows, products round otherwise, and the score of a text would
        depend on which of its tokens are scored.
        """
        chosen = few_scored(targets)
        if chosen is None:
            return self.losses(rows, targets)
        losses = self.losses(rows[chosen], targets[chosen])
        return losses.new_zeros(len(rows)).index_copy(0, chosen, losses)

    def losses(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Compute negative log-likelihoods without logits of all rows: rows (R, D), targets (R,) -> (R,)."""
        nll: Tensor = self.bins[0](rows, self.head_columns(targets))
        if len(self.spans) == 1:
            return nll
        order, counts = self.rows_by_bin(targets)
        for part, logits, chosen in zip(self.spans[1:], self.bins[1:], order.split(counts)[1:], strict=True):
            # Row 0 is added with weight 0, so that the bin always runs.
            chosen = F.pad(chosen, (0, 1), value=0)
            weight = F.pad(torch.ones_like(chosen[1:]), (0, 1), value=0)
            local = (targets[chosen] - part.start).clamp(0, part.size - 1)
            nll = nll.index_add(0, chosen, logits(rows[chosen], local) * weight)
        return nll

    def rows_by_bin(self, targets: Tensor) -> tuple[Tensor, list[int]]:
        """Return the indices of rows in the order of their bins, (R,), and the number of rows of every bin.

        The order within a bin is that of the rows. A GPU waits once for the host, for the numbers of all bins; reading
        `nonzero` of each bin would wait at every bin. Rows without a target belong to bin 0.
        """
        bins = torch.stack([targets >= part.start for part in self.spans[1:]]).sum(0)
        counts = (bins[:, None] == torch.arange(len(self.spans), device=targets.device)).sum(0)
        return bins.argsort(stable=True), counts.tolist()

    def head_columns(self, targets: Tensor) -> Tensor:
        """Return the column of each target in the head: its own, or that of its bin; (R,)."""
        column = targets
        for index, part in enumerate(self.spans[1:], start=1):
            column = torch.where(part.holds(targets), self.cluster_column(index), column)
        return column

    def simple_scores(self, rows: Tensor, targets: Tensor) -> TokenScores:
        """Compute losses from whole logits, and whether targets are most probable: rows (R, D), targets (R,)."""
        if len(self.spans) > 1:
            return self.adaptive_scores(rows, targets)
        logits = full_precision(self.bins[0](rows))
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
        return TokenScores(nll, logits.argmax(-1) == targets)

    def adaptive_scores(self, rows: Tensor, targets: Tensor) -> TokenScores:
        """Compute log p(w in bin i) = log-probability of bin i in the head + that of w in bin i.

        rows (R, D), targets (R,) -> (R,) each.
        """
        column = self.head_columns(targets)
        head_logits = full_precision(self.bins[0](rows))
        nll = F.cross_entropy(head_logits, column, ignore_index=IGNORE, reduction="none")
        for part, logits in zip(self.spans[1:], self.bins[1:], strict=True):
            # Only the rows of this bin, and row 0 with weight 0, so that the bin always runs.
            chosen = F.pad(part.holds(targets).nonzero().squeeze(1), (0, 1), value=0)
            weight = F.pad(torch.ones_like(chosen[1:]), (0, 1), value=0)
            local = (targets[chosen] - part.start).clamp(0, part.size - 1)
            bin_nll = F.cross_entropy(full_precision(logits(rows[chosen])), local, reduction="none")
            nll = nll.index_add(0, chosen, bin_nll * weight)
        return TokenScores(nll, self.adaptive_hits(rows, targets, column, head_logits, nll))

    def adaptive_hits(self, rows: Tensor, targets: Tensor, column: Tensor, head_logits: Tensor, nll: Tensor) -> Tensor:
        """Return whether every other token is less probable than the target, (R,) bool.

        No token is more probable than its bin, so a bin is computed only where it could still beat the target.

        Args:
            column: (R,) column in the head of the target, or of its bin.  nll: (R,).
        """
        head = head_logits.log_softmax(-1)
        others = head.scatter(1, column.clamp(min=0)[:, None], -math.inf)[:, : self.spans[0].size]
        hits = (targets != IGNORE) & (-nll > others.amax(-1))
        for index, part in enumerate(self.spans[1:], start=1):
            in_head = head[:, self.cluster_column(index)]
            chosen = F.pad((hits & (in_head >= -nll)).nonzero().squeeze(1), (0, 1), value=0)  # row 0: it always runs
            log_probs = in_head[chosen, None] + full_precision(self.bins[index](rows[chosen])).log_softmax(-1)
            local = (targets[chosen, None] - part.start).clamp(0, part.size - 1)
            without_target = torch.where(part.holds(targets[chosen, None]), -math.inf, log_probs.gather(1, local))
            is_best = -nll[chosen] > log_probs.scatter(1, local, without_target).amax(-1)
            hits[chosen[:-1]] = is_best[:-1]
        return hits

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities of the whole vocabulary, (..., D) -> (..., V) float32 or wider; for generation."""
        head: Tensor = full_precision(self.bins[0](hidden)).log_softmax(-1)
        if len(self.spans) == 1:
            return head
        parts = [head[..., : self.spans[0].size]]
        for index, logits in enumerate(self.bins[1:], start=1):
            column = self.cluster_column(index)
            parts.append(head[..., column : column + 1] + full_precision(logits(hidden)).log_softmax(-1))
        return torch.cat(parts, dim=-1)

    def cluster_column(self, index: int) -> int:
        """Return the column of the head that scores bin `index` >= 1: counted from the end, as published."""
        return self.spans[0].size + len(self.spans) - 1 - index

"""What the figures of the infinity-former share: its layers, the marks of its updates, its mass on words.

Shape letters: T segment, H heads, R bins, W words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.inspection.walk import SegmentReading
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.inspection import SIGNAL, Inspection, Rows
from dist_mem.papers.figures.parts.source import FigureSource
from dist_mem.papers.figures.parts.words import DocumentWord, token_mass

LEAST_WIDTH = 0.01  # of a part of [0, 1] that gets a mark


def signal_memories(source: FigureSource, figure: str) -> list[Infinite]:
    """Return the long-term memory of every layer.

    Raises:
        UnusableError: the memory has no signal.
    """
    memories = [memory for memory in source.trained_model.model.memories() if isinstance(memory, Infinite)]
    if not memories:
        raise source.missing_error(figure, "a continuous long-term memory", "give a run of memory.kind infinite")
    return memories


def signal_layers(layers: Sequence[Inspection]) -> list[Inspection]:
    """Return the layers that have a signal, in the order of `signal_memories`."""
    return [layer for layer in layers if SIGNAL in layer.rows]


def update_marks(tau: float) -> list[float]:
    """Return the borders between what successive updates have brought: tau, tau^2, ...; the newest is on the right."""
    marks = []
    border = tau
    while border * (1 - tau) > LEAST_WIDTH:
        marks.append(border)
        border *= tau
    return marks


def is_empty(rows: Rows) -> bool:
    """Return whether the signal holds nothing yet."""
    return bool((rows.spans.begin == rows.spans.end).all())


def least_tokens(source: FigureSource, memory: Infinite, num_updates: int) -> int:
    """Return how many tokens a document needs, so that a segment reads a signal of so many updates.

    An update has the rows of a segment, which enters once the memory below has evicted it.
    """
    return memory.kept_len + (num_updates + 1) * source.trained_model.config.train.seg_len + 1


def mass_on_words(rows: Rows, step: SegmentReading, words: Sequence[DocumentWord]) -> Tensor:
    """Return the mass of each query on the words of the document, the mean over the heads, (T, W) float64."""
    found = token_mass(rows, step.num_inputs)
    mass = found.mass.mean(dim=0)
    first = step.first_input + found.first  # position of the first column; BOS, at -1, is in no word
    ends = torch.tensor([0, *(word.end for word in words)])
    sums = torch.cat([mass.new_zeros(len(mass), 1), mass.cumsum(dim=1)], dim=1)
    places = (ends - first).clamp(min=0, max=mass.shape[1])
    return sums[:, places].diff(dim=1)


def check_same_text(sources: Sequence[FigureSource]) -> None:
    """Raise UnusableError unless all runs read the same tokens."""
    first = sources[0]
    for source in sources[1:]:
        mine, other = (each.trained_model.tokenizer.fingerprint for each in (first, source))
        if mine != other or first.documents.index.fingerprint != source.documents.index.fingerprint:
            raise UnusableError(
                f"{source.checkpoint.run_dir} and {first.checkpoint.run_dir} have other data or another tokenizer: "
                "give two runs that were trained on the same data"
            )

"""The memory space of each word, with and without sticky memories (Martins et al. 2022, figures 5, 10 and 11, app. D).

As in the paper: the space of a word is half the distance to the word before it plus half that to the word after it, in
the last layer's signal after 5 updates (Voronoi cells); a word of several tokens has theirs together. Without sticky
memories, places follow from the geometry alone, so one run gives both panels. Phrases are neighbouring words whose
space is above .005, which in the paper's runs is 1.5 times the space of any word without sticky memories; with shorter
segments that space is larger, and 1.5 times it is the limit. Figures 10 and 11 are the first and second document that
is long enough, figure 5 the phrases of the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.data.documents import Document
from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import BLUE, VERMILION, mark_lines, new_picture
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.inspection import Spans
from dist_mem.memory.parts.signal_inspection import spans_of_rows
from dist_mem.memory.parts.signal_places import Trace, append, shares
from dist_mem.papers.figures.parts.signal import least_tokens, signal_layers, signal_memories
from dist_mem.papers.figures.parts.source import Figure, FigureSource
from dist_mem.papers.figures.parts.words import DocumentWord, phrases, words_of

NUM_UPDATES = 5
LEAST_SPACE = 0.005  # of a phrase, as in the paper
ABOVE_EVEN = 1.5  # times the largest space without sticky memories
NAMES = ("infinite.fig10", "infinite.fig11", "infinite.fig5")


class Space(NamedTuple):
    """The words in a signal, and the space that each takes."""

    document: str
    words: list[DocumentWord]
    sticky: list[float]  # the shares of [0, 1]; they sum to 1
    even: list[float]  # without sticky memories
    borders: list[int]  # words before which an update ends


def memory_space(source: FigureSource, memory: Infinite, place: int) -> Space:
    """Return the space of every word in the last layer's signal after NUM_UPDATES updates.

    Raises:
        UnusableError: no document is long enough.
    """
    geometry = memory.geometry
    why = f"a long-term memory after {NUM_UPDATES} updates"
    document = source.example(least=least_tokens(source, memory, NUM_UPDATES), place=place, why=why)
    words = words_of(source.trained_model.tokenizer, document.tokens)
    before_newest = (NUM_UPDATES - 1) * geometry.num_rows
    first_input, sticky = _places(source, document, before_newest)
    num_rows = len(sticky)
    first_end = num_rows - before_newest  # with data.cut = end the first update may have fewer rows
    even = append(sticky, None, first_end, geometry, is_first=True)
    for _ in range(NUM_UPDATES - 1):
        even = append(even, None, geometry.num_rows, geometry, is_first=False)
    spans = spans_of_rows(memory, num_rows)
    found = Spans(spans.begin + first_input, spans.end + first_input)
    held = [word for word in words if word.begin < int(found.end.max())]
    ends = [int(end) for end in found.end[first_end - 1 : -1 : geometry.num_rows]]
    return Space(
        source.id_of(document),
        held,
        _by_word(shares(sticky), found, held),
        _by_word(shares(even), found, held),
        [sum(word.begin < end for word in held) for end in ends],
    )


def _places(source: FigureSource, document: Document, before: int) -> tuple[int, Tensor]:
    """Return the position of the first input of the segment that first reads more rows than `before`; their places."""
    for step, layers in source.read(document):
        trace: Trace = signal_layers(layers)[-1].trace
        if len(trace.places[0]) > before:
            return step.first_input, trace.places[0]
    raise UnusableError(
        f"{source.checkpoint.run_dir}: memory.memory_threshold empties the signal before {NUM_UPDATES} updates"
    )


def _by_word(space: Tensor, spans: Spans, words: Sequence[DocumentWord]) -> list[float]:
    """Return the space of each word: that of its tokens. BOS, which is in no word, is given to the first."""
    begins = torch.tensor([word.begin for word in words])
    by_word = torch.zeros(len(words), dtype=torch.float64)
    for offset in range(int((spans.end - spans.begin).max())):  # a row of several tokens has them in equal parts
        token = spans.begin + offset
        word = (torch.searchsorted(begins, token, right=True) - 1).clamp(min=0)
        by_word.index_add_(0, word, space / (spans.end - spans.begin))
    return by_word.tolist()


def largest_tenth(values: Sequence[float]) -> float:
    """Return the share of the tenth of the words that has most space."""
    return math.fsum(sorted(values, reverse=True)[: max(1, len(values) // 10)]) / math.fsum(values)


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source = sources[0]
    memory = signal_memories(source, name)[-1]
    if memory.options.sampling == "linear":
        raise source.missing_error(name, "sticky memories", "memory.sampling is linear; give a run with sticky")
    space = memory_space(source, memory, place=int(name == "infinite.fig11"))
    limit = max(LEAST_SPACE, ABOVE_EVEN * max(space.even))
    found = phrases(space.words, space.sticky, above=limit)
    picture, plots = new_picture(3.6, rows=2, sharex=True, sharey=True)
    for axes, values, color, title in (
        (plots[0], space.even, BLUE, "without sticky memories"),
        (plots[1], space.sticky, VERMILION, "with sticky memories"),
    ):
        axes.bar(range(len(values)), values, width=1.0, color=color)
        mark_lines(axes, [border - 0.5 for border in space.borders])
        axes.axhline(limit, color="0.45", linewidth=0.8, linestyle=":", gid="mark")
        axes.set_title(title)
        axes.set_ylabel("memory space")
        axes.margins(x=0)
    plots[1].set_xlabel("word in the memory (0: oldest)")
    rows = [
        (place, word.text, even, sticky)
        for place, (word, even, sticky) in enumerate(zip(space.words, space.even, space.sticky, strict=True))
    ]
    listed = " | ".join(f"{text!r} {value:.4f}" for text, value in found) or "none"
    oldest = math.fsum(space.sticky[: space.borders[0]]) / math.fsum(space.even[: space.borders[0]])
    tenths = [largest_tenth(values) for values in (space.sticky, space.even)]
    caption = (
        f"Memory space of each word in the last layer's signal after {NUM_UPDATES} updates, document "
        f"{space.document} of split {source.split}. Dashed: borders between updates; dotted: {limit:.4f}, above which "
        f"a phrase counts. The oldest update has {oldest:.2f} times the space that it has without sticky "
        f"memories, and the tenth of the words with most space has {tenths[0]:.0%} of all (without: {tenths[1]:.0%})."
    )
    return DrawnFigure(
        picture, Table(("place", "word", "even", "sticky"), rows), caption, f"Phrases with the largest space: {listed}"
    )


FIGURE = Figure(names=NAMES, title="memory space of each word, with and without sticky memories", draw=draw)

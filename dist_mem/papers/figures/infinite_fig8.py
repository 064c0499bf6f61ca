"""Words in the long-term memory that a token attended to, where the infinity-former beats a baseline.

Martins et al. 2022, figures 8 and 9, app. D: words that an infinity-former predicts better than Transformer-XL, with
the words of the last layer's long-term memory that receive attention above 0.05 shaded. Figure 8 is the word with the
largest gain, figure 9 the next other word. Attention is the mean over the heads, which the paper does not say. The
caption adds what the examples cannot show: for how many of the 100 words with the largest gain the memory holds the
same word, and how much of its attention that gets, against its share of the text.
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
from dist_mem.evaluation.plotting.style import VERMILION, new_picture
from dist_mem.inspection.walk import walk
from dist_mem.papers.figures.parts.signal import (
    check_same_text,
    is_empty,
    least_tokens,
    mass_on_words,
    signal_layers,
    signal_memories,
)
from dist_mem.papers.figures.parts.source import Figure, FigureSource
from dist_mem.papers.figures.parts.words import (
    DocumentWord,
    ShadedWord,
    draw_text,
    excerpts,
    lines_of,
    strip_punctuation,
    words_of,
)

LIMIT = 0.05  # attention of a shaded word
MOST = 100  # gains that the caption counts
AROUND = 12  # words shown on both sides of a shaded one
MOST_LINES = 22
NAMES = ("infinite.fig8", "infinite.fig9")


class Gain(NamedTuple):
    """A word that the infinity-former predicts better, and where it looked."""

    word: DocumentWord
    nats: float  # baseline minus infinity-former, of the token where it is largest
    attention: list[float]  # of each word in the memory


def word_gains(
    source: FigureSource, baseline: FigureSource, document: Document, words: Sequence[DocumentWord]
) -> list[Gain]:
    """Return the words with the largest gains, one per token, largest first."""
    losses = torch.full((len(document.tokens),), torch.inf)
    for step in walk(baseline.trained_model, document):
        _put_losses(losses, step.first_input, step.output.nll[0, : step.num_inputs].cpu())
    begins = torch.tensor([word.begin for word in words])
    found: list[tuple[float, int, Tensor]] = []
    for step, layers in source.read(document):
        rows = signal_layers(layers)[-1].rows["signal"]
        if is_empty(rows):
            continue
        mass = mass_on_words(rows, step, words)
        nll = step.output.nll[0, : step.num_inputs].cpu()
        for query, loss in enumerate(nll.tolist()):
            position = step.first_input + 1 + query
            if position < len(losses) and bool(torch.isfinite(losses[position])):
                found.append((float(losses[position]) - loss, position, mass[query]))
        found = sorted(found, key=lambda item: -item[0])[:MOST]
    places = [int(torch.searchsorted(begins, position, right=True)) - 1 for _, position, _ in found]
    return [Gain(words[place], nats, mass.tolist()) for place, (nats, _, mass) in zip(places, found, strict=True)]


def _put_losses(losses: Tensor, first_input: int, nll: Tensor) -> None:
    here = slice(first_input + 1, first_input + 1 + len(nll))
    losses[here] = nll[: len(losses[here])]


def same_word_share(gains: Sequence[Gain], words: Sequence[DocumentWord]) -> tuple[int, float, float]:
    """Return how many memories hold the predicted word, the mean attention that it gets there, and its share of text.

    A memory is all words with attention, and its text those before the newest of them.
    """
    attention, text = list[float](), list[float]()
    for gain in gains:
        held = max((place for place, value in enumerate(gain.attention) if value > 0), default=-1) + 1
        same = [
            place for place in range(held) if strip_punctuation(words[place].text) == strip_punctuation(gain.word.text)
        ]
        if same:
            total = math.fsum(gain.attention)
            attention.append(math.fsum(gain.attention[place] for place in same) / total)
            text.append(len(same) / held)
    number = len(attention)
    return number, math.fsum(attention) / max(1, number), math.fsum(text) / max(1, number)


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source, baseline = sources
    memory = signal_memories(source, name)[-1]
    check_same_text(sources)
    document = source.example(least=2 * least_tokens(source, memory, 1), why="a long-term memory to look into")
    words = words_of(source.trained_model.tokenizer, document.tokens)
    gains = [
        gain
        for gain in word_gains(source, baseline, document, words)
        if gain.nats > 0 and strip_punctuation(gain.word.text)
    ]
    if not gains:
        raise UnusableError(
            f"document {source.id_of(document)}: {source.label} predicts no word better than {baseline.label}; give "
            "another --document"
        )
    different = {strip_punctuation(gain.word.text): gain for gain in reversed(gains)}
    chosen = sorted(different.values(), key=lambda gain: -gain.nats)
    gain = chosen[min(NAMES.index(name), len(chosen) - 1)]
    shaded = [place for place, value in enumerate(gain.attention) if value > LIMIT]
    best = sorted(range(len(words)), key=lambda place: -gain.attention[place])[:5]
    lines = lines_of(excerpts(_shade_words(words, gain, shaded or best), AROUND))[:MOST_LINES]
    picture, axes = new_picture(0.165 * len(lines) + 0.5)
    draw_text(axes, lines, size=7.6)
    before = " ".join(word.text for word in words if gain.word.begin - 60 < word.begin < gain.word.begin)
    axes.set_title(f"predicted: {gain.word.text!r}, {gain.nats:.2f} nats better than {baseline.label}", loc="left")
    rows = [(place, words[place].text, value) for place, value in enumerate(gain.attention) if value > 0]
    number, on_same, share = same_word_share(gains, words)
    caption = (
        f"Words of the last long-term memory that get attention when {source.label} predicts "
        f"{gain.word.text!r} (document {source.id_of(document)} of split {source.split}). "
        + (f"Shaded: above {LIMIT}. " if shaded else f"No word gets more than {LIMIT}; shown: the five that get most. ")
        + f"Of the {len(gains)} tokens with the largest gains, {number} are of words that the memory holds; "
        f"those words get {on_same:.1%} of its attention and are {share:.1%} of its text."
    )
    most = ", ".join(f"{words[place].text!r} {gain.attention[place]:.3f}" for place in best)
    text = f"Before it: ... {before}\n\nMost attended: {most}"
    return DrawnFigure(picture, Table(("place", "word", "attention"), rows), caption, text)


def _shade_words(words: Sequence[DocumentWord], gain: Gain, chosen: Sequence[int]) -> list[ShadedWord]:
    """Return all words, the chosen ones shaded by their attention."""
    top = max((gain.attention[place] for place in chosen), default=1.0)
    shades = {place: 0.15 + 0.6 * gain.attention[place] / top for place in chosen}
    return [ShadedWord(word.text, shades.get(place, 0.0), VERMILION) for place, word in enumerate(words)]


FIGURE = Figure(
    names=NAMES,
    title="words in the memory that a word attended to, where it beats a baseline",
    draw=draw,
    most_runs=2,
    least_runs=2,
    runs="RUN BASELINE, an infinity-former and a run without a long-term memory",
)

"""Excerpts of the long-term memory that were attended to most while an answer was written, in a dialogue.

Martins et al. 2022, figures 4 and 12: for some answers of the model in one dialogue, the excerpts of its long-term
memory that receive most attention, each answer with its colour. The answers are those of `dist-mem dialogue`. The
history and the answer are then read once more, with every layer inspected: teacher-forced attention is that of writing.
Attention is that of the last layer, mean over heads and the answer's tokens; excerpts are neighbouring words with at
least THRESHOLD times an even share. Figure 4 is the first dialogue of the split that is long enough, 12 the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.documents import Document
from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import BLUE, GREEN, ORANGE, new_picture
from dist_mem.generation.generate import Sampling
from dist_mem.papers.dialogue.replies import Answer, Conversation, answer_all, choose_replies, find_replies
from dist_mem.papers.figures.parts.signal import is_empty, least_tokens, mass_on_words, signal_layers, signal_memories
from dist_mem.papers.figures.parts.source import Figure, FigureSource
from dist_mem.papers.figures.parts.words import (
    DocumentWord,
    ShadedWord,
    draw_text,
    excerpts,
    lines_of,
    phrases,
    words_of,
)

NUM_ANSWERS, NUM_TOKENS = 3, 50
COLORS = (ORANGE, BLUE, GREEN)
THRESHOLD = 3.0  # times the mean over the words in the memory
AROUND = 6  # words shown on both sides of a shaded one
MOST_LINES = 34
NAMES = ("infinite.fig4", "infinite.fig12")


class AnswerAttention(NamedTuple):
    """An answer, and how it looked at the words before it."""

    answer: Answer
    words: list[DocumentWord]  # of the dialogue, as far as the memory holds it
    attention: list[float]


def read_attention(source: FigureSource, conversation: Conversation, answer: Answer) -> AnswerAttention:
    """Read the history and the answer, and return the attention of the answer's tokens to each word of the history."""
    trained = source.trained_model
    history = np.asarray(conversation.tokens[: answer.place.start])
    written = trained.tokenizer.encode(answer.text)
    words = words_of(trained.tokenizer, history)
    mass, count = torch.zeros(len(words), dtype=torch.float64), 0
    document = Document(conversation.number, np.concatenate([history, written]), scored=None, recall=None)
    for step, layers in source.read(document):
        rows = signal_layers(layers)[-1].rows["signal"]
        position = step.first_input + 1 + torch.arange(step.num_inputs)  # of the predicted token
        of_answer = (position >= len(history)) & (position < len(document.tokens))
        if of_answer.any() and not is_empty(rows):
            mass += mass_on_words(rows, step, words)[of_answer].sum(dim=0)
            count += int(of_answer.sum())
    held = int(mass.nonzero().max()) + 1 if mass.any() else 0
    return AnswerAttention(answer, words[:held], (mass / max(1, count))[:held].tolist())


def limit_of(found: AnswerAttention) -> float:
    """Return the attention above which a word is in an excerpt."""
    return THRESHOLD * math.fsum(found.attention) / max(1, len(found.words))


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source = sources[0]
    memory = signal_memories(source, name)[-1]
    document = source.example(
        least=least_tokens(source, memory, 1) + NUM_TOKENS, place=NAMES.index(name), why="a dialogue to remember"
    )
    conversation = _conversation(source, document)
    inside = [reply for reply in conversation.replies if reply.start >= least_tokens(source, memory, 1)]
    if not inside:
        raise source.missing_error(
            name, "replies after the memory has begun to fill", "give another --document, a longer one"
        )
    chosen = choose_replies(inside, first=0, num_chosen=NUM_ANSWERS)
    sampling = Sampling(top_p=0.9)
    answers = answer_all(
        source.trained_model, [conversation], [chosen], num_lanes=1, num_tokens=NUM_TOKENS, sampling=sampling
    )
    found = [read_attention(source, conversation, answer) for answer in answers]
    lines = []
    for number, (one, color) in enumerate(zip(found, COLORS, strict=False)):
        written = [ShadedWord(word, 0.45, color) for word in one.answer.text.split()]
        lines += lines_of([ShadedWord(f"Answer {number + 1}:", 0.0, color), *written])
    lines += [[]]
    lines += lines_of(excerpts(_shade_words(found), AROUND))[: MOST_LINES - len(lines)]
    picture, axes = new_picture(0.165 * len(lines) + 0.5)
    draw_text(axes, lines, size=7.6)
    axes.set_title("answers, and the words of the long-term memory that they attended to", loc="left")
    rows = [
        (number + 1, place, word.text, value)
        for number, one in enumerate(found)
        for place, (word, value) in enumerate(zip(one.words, one.attention, strict=True))
    ]
    caption = (
        f"Answers of {source.label} in dialogue {conversation.id} of split {source.split}, and the words of its "
        f"long-term memory that get at least {THRESHOLD:g} times an even share of an answer's attention, in its colour "
        "(last layer that has one, mean over heads and the answer's tokens)."
    )
    return DrawnFigure(picture, Table(("answer", "place", "word", "attention"), rows), caption, _text(found))


def _conversation(source: FigureSource, document: Document) -> Conversation:
    if document.scored is None:
        raise UnusableError(
            f"{source.documents.index.split_dir}: the documents have no replies: infinite.fig4 shows answers in a "
            "dialogue; point data.path at data built by `dist-mem data build cmu_dog`"
        )
    entry = source.documents.index.documents[document.number]
    replies = find_replies(np.asarray(document.scored, dtype=bool))
    return Conversation(document.number, entry.id, entry.title, document.tokens, replies)


def _shade_words(found: Sequence[AnswerAttention]) -> list[ShadedWord]:
    """Return the words that the longest memory holds; a word of several excerpts has the colour that looked most."""
    words = max((one.words for one in found), key=len)
    shown = []
    for place, word in enumerate(words):
        shares = [one.attention[place] / limit_of(one) if place < len(one.words) else 0.0 for one in found]
        best = max(range(len(shares)), key=shares.__getitem__)
        shown.append(ShadedWord(word.text, 0.45 if shares[best] >= 1 else 0.0, COLORS[best]))
    return shown


def _text(found: Sequence[AnswerAttention]) -> str:
    parts = []
    for number, one in enumerate(found):
        parts_read = phrases(one.words, one.attention, above=limit_of(one))[:5]
        listed = " | ".join(f"{text!r} {value:.4f}" for text, value in parts_read) or "none"
        parts.append(
            f"Answer {number + 1}: {one.answer.text}\n\nPeople's: {one.answer.reference}\n\nExcerpts: {listed}"
        )
    return "\n\n".join(parts)


FIGURE = Figure(names=NAMES, title="excerpts of the memory that an answer attended to, in a dialogue", draw=draw)

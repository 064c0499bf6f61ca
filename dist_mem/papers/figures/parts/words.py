"""Words of a document's tokens, a picture of a text whose words are shaded, and attention as mass on tokens.

Whatever the rows are, a row's mass is shared evenly by the tokens that it came from. Tokens are counted from the
segment's first input, so query t reads token t and older ones, and predicts token t + 1.
Shape letters: T segment, R rows, H heads, L tokens, D distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.memory.parts.inspection import Rows

LINE = 92  # characters of a line in a picture
_SPACE = b" \n\t\r"


class DocumentWord(NamedTuple):
    """The tokens [begin, end) of a document, up to the space before the next word."""

    begin: int
    end: int
    text: str  # without outer spaces


def words_of(tokenizer: Tokenizer, tokens: np.ndarray) -> list[DocumentWord]:
    """Return the words of a document in order; every token is in one of them, spaces in the word after them."""
    pieces = [tokenizer.pieces[token] for token in tokens.tolist()]
    begins = []
    has_text = True
    for place, piece in enumerate(pieces):
        # A token of spaces begins a word, and is joined by the text after it.
        if has_text and (place == 0 or piece[:1] in _spaces() or pieces[place - 1][-1:] in _spaces()):
            begins.append(place)
            has_text = False
        has_text = has_text or bool(piece.strip(_SPACE))
    ends = [*begins[1:], len(pieces)]
    return [
        DocumentWord(begin, end, b"".join(pieces[begin:end]).decode("utf-8", "replace").strip())
        for begin, end in zip(begins, ends, strict=False)
    ]


def _spaces() -> tuple[bytes, ...]:
    return tuple(bytes([code]) for code in _SPACE)


def strip_punctuation(text: str) -> str:
    """Return a word without its punctuation, in lower case."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def phrases(words: Sequence[DocumentWord], values: Sequence[float], *, above: float) -> list[tuple[str, float]]:
    """Return neighbouring words with values above a limit as phrases, with their largest value, largest first."""
    found: list[tuple[str, float]] = []
    run: list[int] = []
    for place in range(len(words) + 1):
        if place < len(words) and values[place] > above:
            run.append(place)
        elif run:
            text = " ".join(words[member].text for member in run)
            found.append((text, max(values[member] for member in run)))
            run = []
    return sorted(found, key=lambda item: -item[1])


class ShadedWord(NamedTuple):
    """A word to draw; shade 0 is white."""

    text: str
    shade: float  # 0 to 1
    color: str


def excerpts(words: Sequence[ShadedWord], around: int) -> list[ShadedWord]:
    """Return the shaded words and so many on both sides of each; "[...]" stands for what is left out."""
    shaded = [place for place, word in enumerate(words) if word.shade > 0]
    kept = sorted({near for place in shaded for near in range(max(0, place - around), place + around + 1)})
    found: list[ShadedWord] = []
    newest = -1
    for place in kept:
        if place < len(words):
            found += [words[place]._replace(text="[...]", shade=0.0)] if place != newest + 1 else []
            found.append(words[place])
            newest = place
    return found


def lines_of(words: Sequence[ShadedWord]) -> list[list[tuple[int, ShadedWord]]]:
    """Return the words in lines of at most LINE characters, each with its column."""
    lines: list[list[tuple[int, ShadedWord]]] = [[]]
    column = 0
    for word in words:
        if lines[-1] and column + len(word.text) > LINE:
            lines.append([])
            column = 0
        lines[-1].append((column, word))
        column += len(word.text) + 1
    return lines


def draw_text(axes: Any, lines: Sequence[Sequence[tuple[int, ShadedWord]]], *, size: float) -> None:
    """Draw lines of shaded words into axes, in a font of `size` points whose letters have equal widths."""
    from matplotlib.patches import Rectangle  # takes a second to import

    axes.set_xlim(0, LINE)
    axes.set_ylim(len(lines), 0)
    axes.axis("off")
    for row, line in enumerate(lines):
        for column, (text, shade, color) in line:
            if shade > 0:
                box = Rectangle((column, row + 0.07), len(text), 0.86, color=color, alpha=shade, linewidth=0)
                axes.add_patch(box)
            axes.text(column, row + 0.5, text, family="monospace", fontsize=size, va="center")


class TokenMass(NamedTuple):
    """The mass of every query on each of the tokens first, ..., first + L - 1."""

    mass: Tensor  # (H, T, L) float64
    first: int


def token_mass(rows: Rows, num_queries: int) -> TokenMass:
    """Return the mass of a lane's first queries on each token."""
    weights = rows.weights[:, 0, :num_queries].double().cpu()
    begin, end = rows.spans.begin[0].cpu(), rows.spans.end[0].cpu()
    held = begin < end
    if not held.any():
        return TokenMass(weights.new_zeros(*weights.shape[:2], 0), 0)
    weights, begin, end = weights[..., held], begin[held], end[held]
    first, length = int(begin.min()), int(end.max() - begin.min())
    spread = torch.zeros(len(begin), length, dtype=torch.float64)
    token = first + torch.arange(length)
    inside = (token >= begin[:, None]) & (token < end[:, None])
    spread[inside] = 1.0
    return TokenMass(weights @ (spread / (end - begin)[:, None]), first)


def mass_by_distance(found: TokenMass, num_distances: int) -> Tensor:
    """Return the mass at distances 1, ..., D back from the predicted token, (H, T, D); 1 is the newest input."""
    num_heads, num_queries, length = found.mass.shape
    token = torch.arange(num_queries)[:, None] + 1 - torch.arange(1, num_distances + 1)  # (T, D)
    column = token - found.first + 1
    padded = F.pad(found.mass, (1, 1))  # whatever is not read is column 0 or L + 1
    column = column.clamp(min=0, max=length + 1).expand(num_heads, -1, -1)
    return padded.gather(2, column)

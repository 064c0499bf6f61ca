"""Word classes by stated rules, and what gains by them."""

from __future__ import annotations

import re

import pytest
import torch

from dist_mem.inspection.aggregates import aggregate
from dist_mem.inspection.counterfactual import Passage
from dist_mem.inspection.shown import coloured
from dist_mem.inspection.words import FUNCTION, MARK, NAME, NUMBER, OTHER, distances_to_last, words_of

TEXT = (
    'Chapter 1\n\nOnce Mara Holt of Dunwick promised. "Tom," said she, "I\'m here." Mara went with 3 mules.\n\n'
    "CHAPTER TWO\n\nMara Holt's two mules slept. Sleep came."
)


def pieces_of(text: str) -> list[str]:
    return re.findall(r"\s*\w+|\s*[^\w\s]|\s+", text)


def test_words_are_sorted_by_the_stated_rules() -> None:
    words = words_of(pieces_of(TEXT))
    assert {text: [word.kind for word in words if word.text == text] for text in KINDS} == KINDS


@pytest.mark.parametrize("width", [0, 1, 3])
def test_every_token_belongs_to_one_word(width: int) -> None:
    """Whatever the tokens are: words, single characters, or pieces of three."""
    pieces = [TEXT[at : at + width] for at in range(0, len(TEXT), width)] if width else pieces_of(TEXT)
    words = words_of(pieces)
    assert [word.first for word in words] == [0, *(word.end for word in words[:-1])]
    assert words[-1].end == len(pieces)


def test_a_name_is_found_again_with_its_possessive() -> None:
    words = words_of(pieces_of(TEXT))
    holts = [place for place, word in enumerate(words) if word.text.startswith("Holt")]
    distances = distances_to_last(words)
    assert distances[holts[0]] is None
    assert distances[holts[1]] == words[holts[1]].first - words[holts[0]].first


def test_the_groups_sum_to_the_whole() -> None:
    pieces = pieces_of(TEXT)
    words = words_of(pieces)
    gain = torch.linspace(-1.0, 2.0, len(pieces), dtype=torch.float64)
    gain[0] = torch.nan  # not scored
    found = aggregate(words, gain)
    assert found.num_tokens == len(pieces) - 1
    for groups in (found.by_class, found.by_position):
        assert sum(group.gain for group in groups) == pytest.approx(found.total)
    names = found.by_class[0]
    assert (names.label, sum(group.num_words for group in found.by_distance)) == (NAME, names.num_words)
    assert found.top[0].gain == max(each.gain for each in found.top)
    assert found.names_in_top == sum(each.word.kind == NAME for each in found.top)


@pytest.mark.parametrize("with_colour", [False, True])
def test_the_shown_text_is_the_text_with_marks(with_colour: bool) -> None:
    from dist_mem.inspection.aggregates import word_gains

    pieces = pieces_of(TEXT)
    gain = torch.linspace(-4.0, 4.0, len(pieces), dtype=torch.float64)
    found = coloured(word_gains(words_of(pieces), gain), pieces, Passage(0, len(pieces)), with_colour=with_colour)
    assert re.sub(r"\x1b\[[\d;]*m|\[[+-]\d+\.\d\]", "", found) == TEXT
    assert ("\x1b[" in found) == with_colour


KINDS = {
    "Mara": [NAME, NAME, NAME],  # once inside a sentence, so also where it begins one
    "Holt": [NAME],
    "Holt's": [NAME],
    "Dunwick": [NAME],
    "Tom": [OTHER],  # it begins a sentence here, and is a name nowhere else
    "I'm": [FUNCTION],
    "here": [FUNCTION],
    "CHAPTER": [OTHER],
    "1": [NUMBER],
    "two": [NUMBER],
    "mules": [OTHER, OTHER],
    "Sleep": [OTHER],
    ".": [MARK] * 4,
}

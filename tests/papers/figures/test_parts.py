"""The numbers behind figures: attention by token and distance, words and phrases, g(t)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.memory.parts.inspection import Rows, Spans
from dist_mem.papers.figures.infinite_fig8 import Gain, same_word_share
from dist_mem.papers.figures.lamemo_fig7 import g
from dist_mem.papers.figures.parts.signal import update_marks
from dist_mem.papers.figures.parts.words import (
    LINE,
    Shaded,
    Word,
    excerpts,
    lines_of,
    mass_by_distance,
    phrases,
    token_mass,
    words_of,
)

HEADS, TOKENS, ROWS = 2, 5, 7


def some_rows() -> Rows:
    """Rows of one to four tokens, some of the same ones, and one that holds nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(HEADS, 1, TOKENS, ROWS, generator=generator)
    weights[..., 3] = 0.0
    begin = torch.tensor([[-20, -20, -14, 0, -9, -5, -1]])
    return Rows(weights, Spans(begin, begin + torch.tensor([[4, 4, 2, 0, 3, 1, 1]])))


def test_mass_on_tokens_is_the_mass_on_rows() -> None:
    rows = some_rows()
    found = token_mass(rows, TOKENS)
    assert found.first == -20
    assert torch.allclose(found.mass.sum(dim=2), rows.weights[:, 0].double().sum(dim=2))
    assert torch.allclose(found.mass[..., -1], rows.weights[:, 0, :, 6].double())  # a row of the token -1 alone
    assert torch.allclose(found.mass[..., 0], rows.weights[:, 0, :, :2].double().sum(dim=2) / 4)


def test_rows_that_hold_nothing_have_no_tokens() -> None:
    rows = some_rows()
    empty = token_mass(Rows(rows.weights, Spans(rows.spans.begin, rows.spans.begin)), TOKENS)
    assert empty.mass.shape == (HEADS, TOKENS, 0)
    assert not mass_by_distance(empty, 10).any()


def test_mass_by_distance_is_all_mass_and_every_token_is_at_its_distance() -> None:
    found = token_mass(some_rows(), TOKENS)
    by_distance = mass_by_distance(found, 40)
    assert torch.allclose(by_distance.sum(dim=2), found.mass.sum(dim=2))
    for query in range(TOKENS):
        for distance in range(1, 41):
            column = query + 1 - distance - found.first
            expected = found.mass[:, query, column] if 0 <= column < found.mass.shape[2] else torch.zeros(HEADS)
            assert torch.equal(by_distance[:, query, distance - 1], expected.double())


@pytest.mark.parametrize("d_model", [4, 64])
def test_g_is_the_double_sum_of_the_paper_and_odd(d_model: int) -> None:
    places = torch.linspace(-9.0, 9.0, 37, dtype=torch.float64)
    frequencies = [10000.0 ** (-2.0 * k / d_model) for k in range(1, d_model // 2 + 1)]
    expected = [
        sum(
            math.sin(first * place) * math.cos(other * place)
            for index, first in enumerate(frequencies)
            for number, other in enumerate(frequencies)
            if index != number
        )
        for place in places.tolist()
    ]
    assert g(places, d_model).tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(g(-places, d_model), -g(places, d_model))


def test_marks_are_the_powers_of_tau() -> None:
    marks = update_marks(0.5)
    assert marks[:3] == [0.5, 0.25, 0.125]
    assert marks[-1] > 0.01


def test_every_token_is_in_one_word() -> None:
    text = "Mr. Holmes  sat\n\ndown, he said."
    tokens = BytesTokenizer().encode(text)
    words = words_of(BytesTokenizer(), tokens)
    assert [word.text for word in words] == text.split()
    assert words[0].begin == 0
    assert words[-1].end == len(tokens)
    assert all(first.end == second.begin for first, second in itertools.pairwise(words))
    assert words_of(BytesTokenizer(), np.array([], dtype=np.int64)) == []


def test_phrases_are_neighbouring_words_above_the_limit() -> None:
    words = [
        Word(place, place + 1, text) for place, text in enumerate(["the", "old", "white", "whale", "and", "the", "sea"])
    ]
    values = [0.1, 0.3, 0.5, 0.4, 0.1, 0.2, 0.9]
    assert phrases(words, values, above=0.25) == [("sea", 0.9), ("old white whale", 0.5)]
    assert phrases(words, values, above=1.0) == []


def test_lines_hold_every_word_once_and_are_not_too_long() -> None:
    words = [Shaded("x" * (1 + place % 11), 0.0, "C0") for place in range(100)]
    lines = lines_of(words)
    assert [word for line in lines for _, word in line] == words
    assert all(column + len(word.text) <= LINE for line in lines for column, word in line)


def test_excerpts_are_what_is_near_a_shaded_word() -> None:
    words = [Shaded(str(place), float(place in (1, 9, 10)), "C0") for place in range(14)]
    texts = [word.text for word in excerpts(words, 2)]
    assert texts == ["0", "1", "2", "3", "[...]", "7", "8", "9", "10", "11", "12"]
    assert excerpts([word._replace(shade=0.0) for word in words], 2) == []


def test_the_share_of_the_same_word_is_of_attention_and_of_text() -> None:
    words = [Word(place, place + 1, text) for place, text in enumerate(["Anna,", "said", "Ben", "to", "Anna", "again"])]
    seen = Gain(words[4], 2.0, [0.3, 0.1, 0.1, 0.0, 0.0, 0.0])
    unseen = Gain(words[5], 1.0, [0.3, 0.1, 0.1, 0.0, 0.0, 0.0])
    number, on_same, share = same_word_share([seen, unseen], words)
    assert number == 1
    assert on_same == pytest.approx(0.6)
    assert share == pytest.approx(1 / 3)

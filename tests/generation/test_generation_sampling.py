"""How the next token is drawn, and how much a text repeats itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.generation.generate import Sampling, choose, drawn, kept_probabilities, likeliest_first
from dist_mem.generation.text import TextWriter, distinct, measure, rep
from dist_mem.runtime.terminal import printable
from tests.support.messages import refused

DRAWS = 20_000


def rows(*probabilities: float, count: int = 1) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().expand(count, -1)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 3, "temperature": 0.7}])
def test_tokens_are_drawn_as_often_as_they_should_be(options: dict[str, float]) -> None:
    probabilities = (0.05, 0.4, 0.0, 0.25, 0.3)
    sampling = Sampling(**options)  # type: ignore[arg-type]
    expected = kept_probabilities(rows(*probabilities), sampling)[0]
    for stream, step in ((torch.arange(DRAWS), 3), (torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS))):
        draw = drawn(sampling, stream=stream, step=step)
        share = choose(rows(*probabilities, count=DRAWS), sampling, draw=draw).bincount(minlength=5) / DRAWS
        assert (share - expected).abs().max() < 5 * math.sqrt(0.25 / DRAWS)
        assert (share[expected == 0] == 0).all()


def test_a_draw_depends_on_seed_stream_and_step_alone() -> None:
    log_probs = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    streams, sampling = torch.tensor([4, 0, 9, 2, 7, 1]), Sampling(top_p=0.9, seed=3)
    together = choose(log_probs, sampling, draw=drawn(sampling, stream=streams, step=11))
    for lane in range(6):
        row = slice(lane, lane + 1)
        alone = choose(log_probs[row], sampling, draw=drawn(sampling, stream=streams[row], step=torch.tensor([11])))
        assert torch.equal(alone, together[row])
    same = log_probs[:1].expand(200, -1)
    draws = [
        choose(same, each, draw=drawn(each, stream=torch.arange(200), step=step))
        for each, step in ((sampling, 0), (sampling, 1), (Sampling(top_p=0.9, seed=4), 0))
    ]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_are_ranked_as_by_a_stable_sort(dtype: torch.dtype) -> None:
    """Whatever the signs, with ties, zeros of both signs, tiny numbers and minus infinity, in lanes with a stride."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6, 2, 3000, generator=generator).to(dtype)[:, 0] * torch.logspace(-45, 38, 3000)
    values[1] = values[1].abs()
    values[2] = torch.randint(-3, 3, (3000,), generator=generator) * 0.5
    values[3, ::2] = -math.inf
    values[4] = torch.where(torch.arange(3000) % 3 == 0, 0.0, -0.0)
    assert torch.equal(likeliest_first(values), values.argsort(dim=-1, descending=True, stable=True))


def test_greedy_takes_the_likeliest_token() -> None:
    log_probs = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    tokens = choose(log_probs, Sampling(temperature=0.0, top_k=3, top_p=0.1), draw=torch.rand(8))
    assert torch.equal(tokens, log_probs.argmax(-1))


def test_settings_without_meaning_are_refused() -> None:
    bad: dict[str, list[float]] = {
        "temperature": [-0.1, math.nan, math.inf],
        "top_k": [0, -1],
        "top_p": [0.0, 1.01, -1.0, math.nan],
        "seed": [2**63],
    }
    for name, values in bad.items():
        for value in values:
            with refused(ValueError, f"{name} is "):
                Sampling(**{name: value})  # type: ignore[arg-type]


def test_bytes_of_a_cut_character_wait_until_it_is_whole() -> None:
    writer = TextWriter(BytesTokenizer())
    parts = [writer.add(byte) for byte in "a\u20acb".encode()]
    assert parts == ["a", "", "", "\u20ac", "b"]
    assert [writer.add(byte) for byte in "\u20ac".encode()[:2]] == ["", ""]
    assert writer.end() == "\ufffd" and writer.text == "a\u20acb\ufffd"
    again = TextWriter(BytesTokenizer())
    assert "".join(map(again.add, b"\xffok")) + again.end() == BytesTokenizer().decode(list(b"\xffok")) == "\ufffdok"


def test_nothing_that_steers_a_terminal_is_printed() -> None:
    assert printable("a\n\tb \x1b[2J\x07\r\u20ac") == "a\n\tb \ufffd[2J\ufffd\ufffd\u20ac"


def test_repetition_by_hand() -> None:
    text = "the cat saw the cat and the dog"  # 8 words, 5 different; bigrams: 7, "the cat" twice
    assert rep(text, 1) == pytest.approx(1 - 5 / 8)
    assert rep(text, 2) == pytest.approx(1 - 6 / 7)
    assert rep(text, 3) == 0.0
    assert rep("a a a", 4) is None
    assert distinct([text], 1) == pytest.approx(5 / 8)
    assert distinct([text], 2) == pytest.approx(6 / 8)  # by words, not by bigrams
    assert distinct([text, "the cat"], 2) == pytest.approx(6 / 10)  # counted over both, none across their border
    assert distinct(["", "a"], 2) is None
    both = measure([text, "b b b", ""])
    assert both.rep[1] == pytest.approx((3 / 8 + 2 / 3) / 2)
    assert both.rep[4] == 0.0 and both.distinct[1] == pytest.approx(6 / 11)


DYADIC = (0.125, 0.5, 0.25, 0.125)  # exact in binary, so that p can be met exactly


SKEWED = (0.4, 0.3, 0.2, 0.1)


KEPT: list[tuple[tuple[float, ...], dict[str, float], list[float]]] = [
    (DYADIC, {"top_p": 0.5}, [0, 1, 0, 0]),  # the first token that reaches p, and nothing after it
    (DYADIC, {"top_p": 0.51}, [0, 2 / 3, 1 / 3, 0]),
    (DYADIC, {"top_p": 0.8}, [1 / 7, 4 / 7, 2 / 7, 0]),
    (DYADIC, {"top_p": 1e-9}, [0, 1, 0, 0]),
    (DYADIC, {"top_p": 1.0}, list(DYADIC)),
    (SKEWED, {"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    (SKEWED, {"top_k": 9}, list(SKEWED)),
    ((0.25,) * 4, {"top_k": 2}, [0.5, 0.5, 0, 0]),
    (SKEWED, {"top_k": 2, "top_p": 0.55}, [1, 0, 0, 0]),  # the nucleus is of what top_k left: 0.4 of 0.7 is 0.57
    (SKEWED, {"top_p": 0.55}, [4 / 7, 3 / 7, 0, 0]),
    (SKEWED, {"temperature": 0.5}, [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
    (SKEWED, {"temperature": 0.5, "top_p": 0.53}, [1, 0, 0, 0]),  # temperature comes first: without it, two tokens
    (SKEWED, {"temperature": 1e-12}, [1, 0, 0, 0]),
]


def test_temperature_top_k_and_nucleus_keep_what_they_say_in_this_order() -> None:
    for probabilities, options, expected in KEPT:
        found = kept_probabilities(rows(*probabilities), Sampling(**options))[0]  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(expected)
        assert ((found == 0) == (torch.tensor(expected) == 0)).all()

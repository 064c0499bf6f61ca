"""`dist_mem.score` of a text in parts equals `score` of the whole, for every memory; wrong arguments are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.config import Config, DataConfig, TrainConfig
from dist_mem.contract.subject import VOCAB
from dist_mem.evaluation.trained_model import TrainedModel, init_state, read_lanes
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import next_log_probs, read, start, start_from
from dist_mem.generation.text_scores import score
from tests.generation.test_generation import BOS, same_reading, trained_model
from tests.support.contract_cases import SEG_LEN, case_params
from tests.support.messages import refused

LENGTH = 3 * SEG_LEN + 2
SPLITS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN - 1, LENGTH]
# The published rule takes the length of a segment into account, so that scores change when the segment is completed.
DEPENDS_ON_LENGTH = "lamemo, published window"
GREEDY = Sampling(temperature=0.0)


def text() -> np.ndarray:
    return np.random.default_rng(3).integers(0, BOS, LENGTH)


def model(case: str = "transformer_xl", *, blocks: bool = False) -> TrainedModel:
    config = Config(train=TrainConfig(seg_len=SEG_LEN), data=DataConfig(blocks=blocks))
    return trained_model(case, torch.float32)._replace(config=config)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("case", case_params())
def test_a_text_scored_in_parts_scores_as_the_whole_to_the_last_bit(case: str, blocks: bool) -> None:
    """Issue 15: a continued text lost the tokens of the open segment, and BOS was put before the rest."""
    trained, tokens = model(case, blocks=blocks), text()
    whole = score(trained, tokens)
    assert whole.nll.shape == (LENGTH,)
    assert whole.nll.isnan().sum() == (4 if blocks else 0), "the first token of a block has no score"
    for split in SPLITS:
        first = score(trained, tokens[:split])
        rest = score(trained, tokens[split:], after=first.reading)
        assert same(rest.nll, whole.nll[split:]), split
        num_same = split if case != DEPENDS_ON_LENGTH else split // SEG_LEN * SEG_LEN
        assert same(first.nll[:num_same], whole.nll[:num_same]), split
        assert same_reading(rest.reading, whole.reading)
        assert same_reading(first.reading, read(trained, start(trained), [tokens[:split]]))
    if case == DEPENDS_ON_LENGTH:
        return
    reading, parts = start(trained), []
    for token in tokens:
        scores = score(trained, [token], after=reading)
        reading = scores.reading
        parts.append(scores.nll)
    assert same(torch.cat(parts), whole.nll)


def test_what_was_scored_can_be_written_on() -> None:
    trained, tokens = model(), text()
    scores = score(trained, tokens)
    written = generate(trained, scores.reading, num_tokens=3, sampling=GREEDY)
    again = score(trained, written.tokens[0], after=scores.reading)
    log_probs = next_log_probs(trained, scores.reading)
    torch.testing.assert_close(again.nll[0], -log_probs[0, written.tokens[0][0]], rtol=1e-6, atol=1e-6)
    assert same_reading(again.reading, written.reading)


def test_a_text_is_encoded_and_may_be_empty() -> None:
    trained = model()
    assert score(trained, "").nll.shape == (0,)
    assert score(trained, "w3 w1").tokens.tolist() == trained.tokenizer.encode("w3 w1").tolist()
    assert score(trained, "w3 w1", after=score(trained, "").reading).nll.shape == (2,)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_bare_memory_goes_on_at_the_border_of_a_segment(blocks: bool) -> None:
    """A memory alone has no open segment: without blocks the next one begins with the last token read."""
    trained, tokens = model(blocks=blocks), text()
    border = 2 * SEG_LEN
    inputs = tokens[:border] if blocks else np.concatenate(([BOS], tokens[: border - 1]))
    state = init_state(trained)
    for begin in (0, SEG_LEN):
        part = torch.as_tensor(inputs[begin : begin + SEG_LEN])[None]
        full = torch.tensor([SEG_LEN])
        state = trained.model.features(part, full, state=state).state
    begun = start_from(trained, state, None if blocks else [tokens[border - 1]])
    rest = score(trained, tokens[border:], after=begun)
    assert same(rest.nll, score(trained, tokens).nll[border:])


def test_a_bare_memory_without_its_last_token_is_refused() -> None:
    trained = model()
    state = init_state(trained, [0, 1])
    with refused(TypeError, "scores.reading", "start_from"):
        score(trained, "w1", after=state)  # type: ignore[arg-type]
    with refused(ValueError, "last_tokens"):
        start_from(trained, state)
    with refused(ValueError, "last_tokens"):
        start_from(trained, state, [3])
    with refused(ValueError, "last_tokens"):
        start_from(model(blocks=True), state, [3, 4])
    with refused(ValueError):
        start_from(model("none"), init_state(model("none")), [3])


WRONG_TOKENS: list[tuple[Any, type[Exception], str]] = [
    ("hello", TypeError, r"tokens is 'hello', but must be a list with one row of ids per lane, as \[trained\.tok"),
    (b"hello", TypeError, "tokens is b'hello', but must be a list with one row"),
    (3, TypeError, "tokens is 3, but must be a list with one row"),
    (["hello"], TypeError, r"tokens\[0\] is 'hello', but must be a row of ids"),
    ([[0.5, 1.0]], TypeError, r"tokens\[0\] is \[0\.5, 1\.0\], but must be a row of ids"),
    (np.array([1, 2]), TypeError, r"tokens\[0\] is .*1.*, but must be a row of ids"),
    ([[1], [2]], ValueError, "tokens has rows for 2 lanes, but the reading has 1"),
    ([], ValueError, "tokens has rows for 0 lanes, but the reading has 1"),
    ([[[1, 2]]], ValueError, r"tokens\[0\] has 2 dimensions, but must be a row of ids"),
    ([[1, VOCAB]], ValueError, f"tokens\\[0\\] has the id {VOCAB}, but ids of this model range from 0 to {VOCAB - 1}"),
    ([[-1]], ValueError, r"tokens\[0\] has the id -1, but ids"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), WRONG_TOKENS)
def test_wrong_tokens_are_refused_by_name(tokens: Any, error: type[Exception], message: str) -> None:
    """Issue 15: a text in place of ids failed inside NumPy."""
    trained = model()
    with pytest.raises(error, match=message):
        read(trained, start(trained), tokens)


WRONG_CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda t: score(t, b"w1"), TypeError, "text is b'w1', but must be a str or a row of ids"),
    (lambda t: score(t, [VOCAB]), ValueError, f"text has the id {VOCAB}"),
    (lambda t: score(t, "w1", after=start(t, 2)), ValueError, r"after has 2 lanes, but a text .*select"),
    (lambda t: score("runs/demo", "w1"), TypeError, "trained is 'runs/demo', but must be a model"),
    (lambda t: read(t, "w1", []), TypeError, "reading is 'w1', but must be a Reading"),
    (lambda t: start(t, "w1"), TypeError, "num_lanes is 'w1', but must be an int"),
    (lambda t: init_state(t, 3), TypeError, r"document_ids is 3, but must be a row of ints, as \[0\]"),
    (lambda t: init_state(t, ["a"]), TypeError, r"document_ids is \['a'\], but must be a row of ints"),
    (lambda t: read_lanes(t, 3), TypeError, r"lane_ids is 3, but must be a row of ints"),
    (lambda t: start(t, 0), ValueError, "num_lanes is 0, but must be at least 1"),
    (lambda t: next_log_probs(t, "w1"), TypeError, "reading is 'w1', but must be a Reading"),
    (lambda t: generate(t, "w1", num_tokens=1, sampling=GREEDY), TypeError, "reading is 'w1', but must be a Reading"),
    (lambda t: generate(t, start(t), num_tokens="5", sampling=GREEDY), TypeError, "num_tokens is '5', but must be an"),
    (lambda t: generate(t, start(t), num_tokens=-1, sampling=GREEDY), ValueError, "num_tokens is -1, but must be at"),
    (lambda t: generate(t, start(t), num_tokens=1, sampling=0.8), TypeError, "sampling is 0.8, but must be a Sampling"),
    (
        lambda t: generate(t, start(t), num_tokens=1, sampling=GREEDY, stop_ids=[VOCAB]),
        ValueError,
        f"stop_ids has the id {VOCAB}",
    ),
    (
        lambda t: generate(t, start(t), num_tokens=1, sampling=GREEDY, streams=[1, 2]),
        ValueError,
        "streams has 2 numbers, but the reading has 1 lane",
    ),
    (lambda t: Sampling(temperature="0.8"), TypeError, "temperature is '0.8', but must be a number"),  # type: ignore
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG_CALLS)
def test_wrong_arguments_are_refused_by_name(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(model())


def test_a_reading_of_other_segments_is_refused() -> None:
    trained = model()
    shorter = trained._replace(config=Config(train=TrainConfig(seg_len=SEG_LEN - 1)))
    with pytest.raises(ValueError, match=f"after is a reading in segments of {SEG_LEN} tokens.* reads segments of 3"):
        score(shorter, "w1", after=start(trained))

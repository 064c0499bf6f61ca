"""`dist_mem.score` of a text in parts equals `score` of the whole, for every memory; wrong arguments are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def test_wrong_arguments_are_refused_by_name() -> None:
    """Issue 15: a text in place of ids failed inside NumPy."""
    t: Any = model()
    one, two, state = start(t), start(t, 2), init_state(t, [0, 1])
    greedy: dict[str, Any] = {"num_tokens": 1, "sampling": GREEDY}
    shorter = t._replace(config=Config(train=TrainConfig(seg_len=SEG_LEN - 1)))
    no_rows: list[Any] = ["hello", b"hello", 3, ["hello"], [[0.5, 1.0]], np.array([1, 2])]
    wrong_rows: list[Any] = [[[1], [2]], [], [[[1, 2]]], [np.array([[1]])], [[1, VOCAB]], [np.array([-1])]]
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        *((TypeError, "tokens", partial(read, t, one, tokens)) for tokens in no_rows),
        *((ValueError, "tokens", partial(read, t, one, tokens)) for tokens in wrong_rows),
        (TypeError, "text", lambda: score(t, b"w1")),
        (ValueError, "text", lambda: score(t, [VOCAB])),
        (ValueError, "after has 2 lanes", lambda: score(t, "w1", after=two)),
        (ValueError, "after is a reading in segments of", lambda: score(shorter, "w1", after=one)),
        (TypeError, "start_from", lambda: score(t, "w1", after=state)),
        (TypeError, "trained", lambda: score("runs/demo", "w1")),
        (TypeError, "reading", lambda: read(t, "w1", [])),
        (TypeError, "num_lanes", lambda: start(t, "w1")),
        (ValueError, "num_lanes", lambda: start(t, 0)),
        (TypeError, "document_ids", lambda: init_state(t, 3)),
        (TypeError, "document_ids", lambda: init_state(t, ["a"])),
        (TypeError, "lane_ids", lambda: read_lanes(t, 3)),
        (TypeError, "reading", lambda: next_log_probs(t, "w1")),
        (TypeError, "reading", lambda: generate(t, "w1", **greedy)),
        (TypeError, "num_tokens", lambda: generate(t, one, num_tokens="5", sampling=GREEDY)),
        (ValueError, "num_tokens", lambda: generate(t, one, num_tokens=-1, sampling=GREEDY)),
        (TypeError, "sampling", lambda: generate(t, one, num_tokens=1, sampling=0.8)),
        (ValueError, "stop_ids", lambda: generate(t, one, stop_ids=[VOCAB], **greedy)),
        (ValueError, "streams", lambda: generate(t, one, streams=[1, 2], **greedy)),
        (TypeError, "temperature", lambda: Sampling(temperature="0.8")),
        (ValueError, "last_tokens", lambda: start_from(t, state)),
        (ValueError, "last_tokens", lambda: start_from(t, state, [3])),
        (ValueError, "last_tokens", lambda: start_from(model(blocks=True), state, [3, 4])),
        (ValueError, "", lambda: start_from(model("none"), init_state(model("none")), [3])),
    ]
    for error, name, call in wrong:
        with refused(error, name):
            call()

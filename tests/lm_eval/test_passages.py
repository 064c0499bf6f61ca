"""Log-probabilities of passages: those of the text read alone, whatever else is scored, for every memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dist_mem.config import Config, DataConfig, TrainConfig
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import read, start
from dist_mem.generation.text_scores import score
from dist_mem.lm_eval.passages import Passage, score_passages
from tests.generation.test_generation import BOS, trained_model
from tests.support.contract_cases import SEG_LEN, case_params
from tests.support.messages import refused

CONTEXT_LENS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN + 2]
LENS = [1, 2, SEG_LEN, 2 * SEG_LEN + 1]
LANES = 3


def model(case: str, cut: str = "start") -> TrainedModel:
    config = Config(train=TrainConfig(seg_len=SEG_LEN), data=DataConfig(cut=cut))
    return trained_model(case, torch.float32, cut)._replace(config=config)


def passages() -> list[Passage]:
    """Four continuations of each of several contexts, of which some begin as others."""
    draw = np.random.default_rng(3)
    longest = draw.integers(0, BOS, max(CONTEXT_LENS))
    return [
        Passage(np.concatenate([longest[:length], draw.integers(0, BOS, more)]), first_scored=length)
        for length in CONTEXT_LENS
        for more in LENS
    ]


# A loss in float32 is the difference of numbers of about 5: that of each token rounds by up to 5e-7, even a small one.
ROUNDED = 5e-7 * max(LENS)
# Products of theirs round by the place of a lane in the batch.
ROUNDING = ("infini", "linear", "titans", "block_recurrent", "per block")


@pytest.mark.parametrize("case", case_params())
def test_a_score_is_that_of_the_text_read_alone_and_the_same_bits_whatever_else_is_scored(case: str) -> None:
    """But for products with a matrix or states of the memory, which round by the lane's place among the others."""
    trained = model(case)
    together = score_passages(trained, passages(), num_lanes=LANES)
    read_alone = [-score(trained, tokens).nll[first:].double().sum().item() for tokens, first in passages()]
    assert [result.log_prob for result in together] == pytest.approx(read_alone, rel=1e-6, abs=ROUNDED)
    alone = [score_passages(trained, [passage], num_lanes=LANES)[0] for passage in passages()]
    backwards = score_passages(trained, passages()[::-1], num_lanes=LANES)[::-1]
    for found in (alone, backwards):
        if any(part in case for part in ROUNDING):
            log_probs = [result.log_prob for result in together]
            assert [result.log_prob for result in found] == pytest.approx(log_probs, rel=1e-6, abs=ROUNDED)
        else:
            assert found == together


def test_a_context_is_read_once_for_all_its_continuations() -> None:
    trained, context = model("transformer_xl"), np.arange(5 * SEG_LEN) % BOS
    choices = [Passage(np.concatenate([context, [choice, 1]]), first_scored=len(context)) for choice in range(BOS)]
    calls: list[int] = []
    trained.model.embedding.register_forward_hook(lambda *_: calls.append(1))
    score_passages(trained, choices, num_lanes=BOS)
    assert len(calls) == 5 + 1, "the segments of the context, and all continuations in one batch"


def test_what_greedy_generation_writes_is_greedy_and_nothing_else() -> None:
    trained, context = model("lamemo"), np.arange(SEG_LEN + 2)
    reading = read(trained, start(trained), [context])
    written = generate(trained, reading, num_tokens=2 * SEG_LEN, sampling=Sampling(temperature=0.0)).tokens[0].numpy()
    other = written.copy()
    other[-1] = (other[-1] + 1) % BOS
    texts = [np.concatenate([context, end]) for end in (written, other)]
    found = score_passages(trained, [Passage(text, len(context)) for text in texts], num_lanes=LANES)
    assert [result.is_greedy for result in found] == [True, False]


def test_an_empty_text_is_certain() -> None:
    assert score_passages(model("none"), [Passage(np.zeros(0), 0)], num_lanes=1) == [(0.0, True)]


def test_a_diverged_model_has_no_scores() -> None:
    trained = model("none")
    with torch.no_grad():
        next(trained.model.head.parameters()).fill_(math.nan)
    with refused(EvaluationError):
        score_passages(trained, passages(), num_lanes=LANES)

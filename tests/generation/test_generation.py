"""Generation with memory: equal to reading the document anew from its start, for every memory, found by file name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.config import Config, TrainConfig
from dist_mem.contract.subject import VOCAB
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, choose, generate, stream
from dist_mem.generation.reading import Reading, next_log_probs, read, select, start
from dist_mem.memory.base import named_tensors
from tests.support.contract_cases import SEG_LEN, case_params, small_model
from tests.support.messages import refused

BOS = VOCAB - 1
PROMPT_LENS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN + 2]
NUM_TOKENS = 3 * SEG_LEN + 3  # more than three segments
SAMPLING = Sampling(temperature=1.3, top_k=8, top_p=0.95, seed=5)


def trained_model(case: str, dtype: torch.dtype = torch.float64, cut: str = "start") -> TrainedModel:
    """The small model of the contract tests, with ten words."""
    tokenizer = WordTokenizer([f"w{number}" for number in range(VOCAB - 1)])
    config = Config(train=TrainConfig(seg_len=SEG_LEN))
    checkpoint: Any = None
    model = small_model(case, cut=cut).to(dtype).eval()
    return TrainedModel(model, tokenizer, config, checkpoint, torch.device("cpu"), dtype)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, BOS, (length,), generator=generator) for length in PROMPT_LENS]


def anew(trained: TrainedModel, inputs: Tensor, *, first: int) -> Tensor:
    """Log-probabilities after `first`, ..., all inputs of a document, (prefixes, V), each prefix read anew.

    In segments of T from an empty memory; prefixes are lanes of one batch, and a segment that is incomplete or empty
    is one to the model.
    """
    lengths = torch.arange(first, len(inputs) + 1)
    state = trained.model.init_state(torch.zeros_like(lengths), "cpu", trained.dtype)
    found = torch.zeros(len(lengths), VOCAB, dtype=trained.dtype)
    with torch.no_grad():
        for begin in range(0, len(inputs), SEG_LEN):
            segment = torch.zeros(SEG_LEN, dtype=torch.int64)
            segment[: len(inputs) - begin] = inputs[begin : begin + SEG_LEN]
            valid_len = (lengths - begin).clamp(0, SEG_LEN)
            tokens = segment.expand(len(lengths), -1).where(torch.arange(SEG_LEN) < valid_len[:, None], 0)
            log_probs, state = trained.model.log_probs(tokens, valid_len, state=state)
            ends_here = (lengths > begin) & (lengths <= begin + SEG_LEN)
            found[ends_here] = log_probs[ends_here, valid_len[ends_here] - 1]
    return found


def same_reading(one: Reading, other: Reading) -> bool:
    first, second = named_tensors(one.state), named_tensors(other.state)
    return all(torch.equal(first[name], second[name]) for name in first) and all(
        torch.equal(*pair) for pair in zip(one[1:], other[1:], strict=True)
    )


CUT_FROM_END = ["none", "infinite over causal", "infinite, sticky"]


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        *(pytest.param(*case.values, "start", marks=case.marks) for case in case_params()),
        *((case, "end") for case in CUT_FROM_END),
    ],
)
def test_generation_equals_reading_the_document_anew_at_every_token(case: str, cut: str) -> None:
    """Whatever `data.cut` says: where a text ends is not known, so generation reads from its start."""
    trained = trained_model(case, cut=cut)
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    log_probs = [next_log_probs(trained, reading)]
    tokens = []
    for step in stream(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING):
        tokens.append(step.tokens)
        log_probs.append(next_log_probs(trained, step.reading))
    for lane, prompt in enumerate(prompts()):
        written = torch.stack(tokens)[:, lane]
        inputs = torch.cat([torch.tensor([BOS]), prompt, written])
        reference = anew(trained, inputs, first=1 + len(prompt))
        torch.testing.assert_close(torch.stack(log_probs)[:, lane], reference, rtol=0, atol=1e-10)
        reference[:, BOS] = -torch.inf
        again = choose(reference[:-1], SAMPLING, stream=torch.full((NUM_TOKENS,), lane), step=torch.arange(NUM_TOKENS))
        assert torch.equal(again, written)


@pytest.mark.parametrize("case", case_params())
def test_a_lane_alone_writes_what_it_writes_in_a_batch(case: str) -> None:
    trained = trained_model(case)
    batch = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    together = generate(trained, batch, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    for lane, prompt in enumerate(prompts()):
        alone = read(trained, start(trained), [prompt])
        torch.testing.assert_close(
            next_log_probs(trained, alone)[0], next_log_probs(trained, batch)[lane], rtol=0, atol=1e-10
        )
        written = generate(trained, alone, num_tokens=NUM_TOKENS, sampling=SAMPLING, streams=[lane])
        assert torch.equal(written.tokens[0], together.tokens[lane])


@pytest.mark.parametrize("case", case_params())
def test_how_tokens_came_to_be_read_does_not_matter_to_the_last_bit(case: str) -> None:
    trained = trained_model(case, torch.float32)
    prompt = prompts()[-1]
    at_once = read(trained, start(trained), [prompt])
    piecewise = read(trained, start(trained), [prompt[:0]])
    for token in prompt:
        piecewise = read(trained, piecewise, [token[None]])
    assert same_reading(at_once, piecewise)
    written = generate(trained, at_once, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    read_after = read(trained, start(trained), [torch.cat([prompt, written.tokens[0]])])
    assert same_reading(written.reading, read_after)
    assert torch.equal(next_log_probs(trained, written.reading), next_log_probs(trained, read_after))
    assert same_reading(at_once, read(trained, start(trained), [prompt])), "generation has changed its argument"


def test_a_reading_can_be_read_on_in_several_ways() -> None:
    trained = trained_model("infinite, sticky")
    reading = read(trained, start(trained, 2), [prompts()[-1], prompts()[1]])
    read(trained, reading, [prompts()[-1], prompts()[-1]])
    anew_read = read(trained, start(trained, 2), [prompts()[-1], prompts()[1]])
    assert same_reading(reading, anew_read), "reading on has changed what was read on from"
    branches = select(reading, [0, 0, 1])
    written = generate(trained, branches, num_tokens=NUM_TOKENS, sampling=SAMPLING, streams=[7, 8, 9])
    assert not torch.equal(written.tokens[0], written.tokens[1])
    for lane, stream_number in ((0, 7), (0, 8), (1, 9)):
        alone = select(reading, [lane])
        again = generate(trained, alone, num_tokens=NUM_TOKENS, sampling=SAMPLING, streams=[stream_number])
        assert torch.equal(again.tokens[0], written.tokens[stream_number - 7])


def test_a_token_costs_one_forward() -> None:
    trained = trained_model("transformer_xl")
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    calls: list[int] = []
    trained.model.embedding.register_forward_hook(lambda *_: calls.append(1))
    generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    assert len(calls) == NUM_TOKENS
    calls.clear()
    read(trained, start(trained, len(PROMPT_LENS)), prompts())
    assert len(calls) == 3  # segments of the longest prompt that are complete and behind it; the last stays open


def test_a_lane_ends_with_a_stop_token_and_reads_no_more() -> None:
    trained = trained_model("lamemo")
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    free = generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    stop = int(free.tokens[0][4])
    stopped = generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING, stop_ids=[stop])
    lengths = []
    for lane, (tokens, prompt) in enumerate(zip(free.tokens, prompts(), strict=True)):
        ends = (tokens == stop).nonzero().flatten().tolist()
        expected = tokens[: ends[0] + 1] if ends else tokens
        lengths.append(len(expected))
        assert torch.equal(stopped.tokens[lane], expected)
        alone = read(trained, start(trained), [torch.cat([prompt, expected])])
        assert torch.equal(stopped.reading.open_tokens[lane], alone.open_tokens[0])
        assert stopped.reading.open_len[lane] == alone.open_len[0]
        torch.testing.assert_close(
            next_log_probs(trained, select(stopped.reading, [lane])), next_log_probs(trained, alone), rtol=0, atol=1e-10
        )
    assert min(lengths) < max(lengths)


def test_a_second_call_goes_on_where_the_first_ended() -> None:
    trained = trained_model("compressive")
    reading = read(trained, start(trained), [prompts()[-1]])
    hot = Sampling(temperature=10.0)  # so that another draw is another token
    whole = generate(trained, reading, num_tokens=10, sampling=hot)
    begin = generate(trained, reading, num_tokens=6, sampling=hot)
    end = generate(trained, begin.reading, num_tokens=4, sampling=hot, first_step=6)
    assert torch.equal(torch.cat([begin.tokens[0], end.tokens[0]]), whole.tokens[0])


def test_tokens_without_text_are_written_only_to_stop() -> None:
    trained = trained_model("none")
    reading = start(trained, 64)
    hot = Sampling(temperature=100.0)
    written = generate(trained, reading, num_tokens=8, sampling=hot)
    assert len(torch.cat(written.tokens).unique()) == VOCAB - 1 and BOS not in torch.cat(written.tokens)
    stopped = generate(trained, reading, num_tokens=8, sampling=hot, stop_ids=[BOS])
    assert any(tokens[-1] == BOS for tokens in stopped.tokens)


def test_what_cannot_be_read_is_refused() -> None:
    trained = trained_model("none")
    with refused(ValueError):
        read(trained, start(trained, 2), [np.array([1])])
    for ids in ([VOCAB], [-1]):
        with refused(ValueError):
            read(trained, start(trained), [np.array(ids)])
    with pytest.raises((TypeError, ValueError)):
        read(trained, start(trained), [np.array([[1]])])

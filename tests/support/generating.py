"""Models that read and continue texts, and the same by reading everything from its start."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_mem.config import Config, DataConfig, TrainConfig
from dist_mem.contract.subject import VOCAB
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, choose, draw_uniform, stream
from dist_mem.generation.reading import Reading, next_log_probs, read, start
from dist_mem.memory.base import named_tensors
from tests.support.contract_cases import SEG_LEN, small_model

BOS = VOCAB - 1
PROMPT_LENS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN + 2]
NUM_TOKENS = 3 * SEG_LEN + 3  # more than three segments
SAMPLING = Sampling(temperature=1.3, top_k=8, top_p=0.95, seed=5)


def trained_model(
    case: str = "transformer_xl", dtype: torch.dtype = torch.float64, cut: str = "start", *, blocks: bool = False
) -> TrainedModel:
    """The small model of the contract tests, with ten words."""
    tokenizer = WordTokenizer([f"w{number}" for number in range(VOCAB - 1)])
    config = Config(train=TrainConfig(seg_len=SEG_LEN), data=DataConfig(cut=cut, blocks=blocks))
    checkpoint: Any = None
    model = small_model(case, cut=cut).to(dtype).eval()
    return TrainedModel(model, tokenizer, config, checkpoint, torch.device("cpu"), dtype)


float32_model = partial(trained_model, dtype=torch.float32)


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


def check_reads_as_anew(trained: TrainedModel) -> None:
    """After every token the model foretells what it does after reading the document anew, and draws from that."""
    blocks = trained.config.data.blocks  # which begin without BOS: of an empty prompt nothing is foretold
    given = [prompt for prompt in prompts() if len(prompt) or not blocks]
    before = torch.tensor([] if blocks else [BOS], dtype=torch.int64)
    reading = read(trained, start(trained, len(given)), given)
    log_probs = [next_log_probs(trained, reading)]
    tokens = []
    for step in stream(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING):
        tokens.append(step.tokens)
        log_probs.append(next_log_probs(trained, step.reading))
    for lane, prompt in enumerate(given):
        written = torch.stack(tokens)[:, lane]
        reference = anew(trained, torch.cat([before, prompt, written]), first=len(before) + len(prompt))
        torch.testing.assert_close(torch.stack(log_probs)[:, lane], reference, rtol=0, atol=1e-10)
        reference[:, BOS] = -torch.inf
        draw = draw_uniform(SAMPLING, stream=torch.tensor(lane), step=torch.arange(NUM_TOKENS))
        again = choose(reference[:-1], SAMPLING, draw=draw)
        assert torch.equal(again, written)

"""Generation with memory: equal to reading the document anew from its start, for every memory, found by file name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import Config, TrainConfig
from dist_mem.config.memory_blocks import PER_BLOCK
from dist_mem.contract.subject import VOCAB, Size, Subject
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, choose, drawn, generate, stream
from dist_mem.generation.reading import ROW_STEP, Reading, next_log_probs, num_rows, read, select, start
from dist_mem.memory import memory_class
from dist_mem.memory.base import named_tensors
from dist_mem.model import MemoryLM
from tests.support.contract_cases import CASES, SEG_LEN, case_params, memories_of, small_model
from tests.support.paths import EXAMPLES

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


def check_reads_as_anew(trained: TrainedModel) -> None:
    """After every token the model foretells what it does after reading the document anew, and draws from that."""
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
        draw = drawn(SAMPLING, stream=torch.tensor(lane), step=torch.arange(NUM_TOKENS))
        again = choose(reference[:-1], SAMPLING, draw=draw)
        assert torch.equal(again, written)


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
    check_reads_as_anew(trained_model(case, cut=cut))


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


def shapes_of_forwards(trained: TrainedModel) -> list[tuple[int, ...]]:
    """The shape of the tokens of every later forward of a model."""
    shapes: list[tuple[int, ...]] = []
    trained.model.embedding.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_token_costs_one_forward_where_a_memory_cannot_step() -> None:
    trained = trained_model("block_recurrent")
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    shapes = shapes_of_forwards(trained)
    generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    assert len(shapes) == NUM_TOKENS
    shapes.clear()
    read(trained, start(trained, len(PROMPT_LENS)), prompts())
    assert len(shapes) == 3  # segments of the longest prompt that are complete and behind it; the last stays open


@pytest.mark.parametrize(("case", "openings"), [("transformer_xl", 0), ("lamemo", 1)])
def test_a_token_costs_one_row_where_every_memory_can_step(case: str, openings: int) -> None:
    """Besides the open segment of the prompt, and one forward of every segment that is then complete.

    With a stem, every segment is opened by a forward of its first token.
    """
    trained = trained_model(case)
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    shapes = shapes_of_forwards(trained)
    generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    lanes, longest = len(PROMPT_LENS), int(reading.open_len.max())
    opened, steps = shapes[:openings], shapes[openings:]
    assert opened == [(lanes, 1)] * openings and steps[0] == (lanes, longest)
    assert steps.count((lanes, 1)) == NUM_TOKENS - 1
    segments = [shape for shape in steps[1:] if shape[1] == SEG_LEN]
    assert sum(num for num, _ in segments) == ((reading.open_len + NUM_TOKENS - 1) // SEG_LEN).sum()
    assert len(steps) == NUM_TOKENS + (1 + openings) * len(segments)


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


# Open segments have fewer than T rows where their memories take them.

LONG = 3 * ROW_STEP


def model_of(block: dict[str, Any]) -> MemoryLM:
    return Subject(lambda _: block, Size(lanes=2, seg_len=LONG, segments=4, layers=3)).model().double().eval()


def blocks() -> dict[str, dict[str, Any]]:
    """The cases of the contract tests whose memories compute less than T rows, in the options that fit this segment."""
    longest = {name: max(memory.min_seg_len for memory in memories_of(name)) for name in CASES}
    return {name: fitted(CASES[name]) for name, length in longest.items() if length < SEG_LEN}


def fitted(block: dict[str, Any]) -> dict[str, Any]:
    if block["kind"] == PER_BLOCK:
        return {name: part if name == "kind" else fitted(part) for name, part in block.items()}
    small = memory_class(block["kind"]).small_options
    return {**block, **dict(small(LONG).items() - small(SEG_LEN).items())}  # what depends on the length


@pytest.mark.parametrize("case", case_params(blocks()))
@torch.no_grad()
def test_fewer_rows_give_the_same_outputs(case: str) -> None:
    model = model_of(blocks()[case])
    generator = torch.Generator().manual_seed(1)
    state = model.init_state(torch.arange(2), "cpu", torch.float64)
    for number in range(5):  # from empty memories to full ones
        tokens = torch.randint(0, VOCAB, (2, LONG), generator=generator)
        for longest in (2, ROW_STEP, ROW_STEP + 1):
            valid_len = torch.tensor([longest, 1])
            rows = num_rows(model, longest)
            assert longest <= rows < LONG
            whole = model.features(tokens, valid_len, state=state).hidden
            short = model.features(tokens[:, :rows], valid_len, state=state).hidden
            for lane, length in enumerate(valid_len.tolist()):
                torch.testing.assert_close(short[lane, :length], whole[lane, :length], rtol=0, atol=1e-11)
        state = model.features(tokens, torch.tensor([LONG, LONG if number else 0]), state=state).state


def test_an_open_segment_has_as_many_rows_as_its_memory_takes() -> None:
    """As many as one compressed row takes; a memory gets whole segments unless it says otherwise."""
    rows = [
        num_rows(model_of({"kind": "none"}), length) for length in (1, ROW_STEP, ROW_STEP + 1, 2 * ROW_STEP + 1, LONG)
    ]
    assert rows == [ROW_STEP, ROW_STEP, 2 * ROW_STEP, LONG, LONG]
    compressive = {"kind": "compressive", "mem_len": LONG, "cmem_len": 4, "compression_rate": ROW_STEP + 1}
    blocks: list[tuple[dict[str, Any], int]] = [
        (compressive, 2 * ROW_STEP),
        ({"kind": "transformer_xl", "mem_len": LONG}, ROW_STEP),
        ({"kind": str(EXAMPLES / "averages.py:Averages")}, LONG),
        (CASES["infinite"], LONG),
        ({"kind": "rmt", "num_tokens": 2}, ROW_STEP),
        ({"kind": "rmt", "num_tokens": 3}, LONG),
    ]
    assert [num_rows(model_of(block), 1) for block, _ in blocks] == [expected for _, expected in blocks]

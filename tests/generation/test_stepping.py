"""Generation a row at a time: equal to computing the open segment again, for every memory that can, by discovery."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from dist_mem.config import AdaptiveConfig, Config, TokenTypeConfig, TrainConfig
from dist_mem.contract.rules import further_rows_are_those_of_the_whole_segment
from dist_mem.contract.subject import VOCAB, CheckedMemory, SubjectSize
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation import writing
from dist_mem.generation.generate import NextTokens, Sampling, generate, stream
from dist_mem.generation.reading import Reading, next_log_probs, read, start
from dist_mem.generation.writing import SteppingWriter
from dist_mem.memory.base import Inspectable, named_tensors
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.model import LMState, MemoryLM
from tests.support.contract_cases import CASES, SEG_LEN, small_block, small_model
from tests.support.generating import SAMPLING as SAMPLED
from tests.support.generating import same_reading
from tests.support.llama_models import DYNAMIC, QWEN3
from tests.support.logging_memory import Logging

LANES = 4
CACHE = {"kind": "transformer_xl", "mem_len": SEG_LEN + 1}
GPT2 = {"kind": "gpt2", "num_positions": SEG_LEN, "d_head": None}
LLAMA = {"kind": "llama", "num_kv_heads": 1, "qkv_bias": True, "d_head": 6}
TYPES = [TokenTypeConfig(id=3), TokenTypeConfig(id=5, after=[1]), TokenTypeConfig(id=7, after=[2, 4])]
GREEDY = Sampling(temperature=0.0)


class Case(NamedTuple):
    block: dict[str, Any]
    keys: Mapping[str, Any] = MappingProxyType({})
    norm: str = "pre"

    def subject(self) -> CheckedMemory:
        return CheckedMemory(lambda _: self.block, SubjectSize(LANES, SEG_LEN, 4, 3), self.norm, keys=self.keys)

    def model(self, dtype: torch.dtype = torch.float64) -> MemoryLM:
        return self.subject().model().to(dtype).eval()


KINDS = {  # that step with `small_options`; block_recurrent's segments have two windows there
    "none", "causal", "transformer_xl", "linear", "compressive", "lamemo", "infini", "memorizing", "infinite", "rmt",
    "titans", "armt", "rmt_rows",
}  # fmt: skip
IN_LLAMA = ("none", "transformer_xl", "linear", "compressive", "infinite", "armt", "rmt_rows")  # others refuse a Llama


@cache
def cases() -> dict[str, Case]:
    """Every memory and composition that can step, and what else changes what a row attends to."""
    found = {name: Case(block) for name, block in CASES.items() if small_model(name).can_step}
    assert {name for name, case in found.items() if case.block["kind"] == name} == KINDS
    unseen = small_block("memorizing", sees_itself=False)
    return {
        **found,
        **{f"{kind} in a Llama": Case(small_block(kind), LLAMA) for kind in IN_LLAMA},
        "infini over none in Qwen3": Case(small_block("infini", over={"kind": "none"}, gate_init=0.5), QWEN3),
        "infini over causal in GPT-2": Case(small_block("infini", over={"kind": "causal"}, gate_init=0.5), GPT2),
        "memorizing over none in Qwen3": Case(small_block("memorizing", over={"kind": "none"}), QWEN3),
        "memorizing over causal in GPT-2": Case(small_block("memorizing", over={"kind": "causal"}), GPT2),
        "linear over a window in Qwen3": Case(
            small_block("linear", over=CACHE, over_gate_init=0.5), {**QWEN3, "sliding_window": SEG_LEN - 1}
        ),
        "compressive in Qwen3": Case(small_block("compressive"), QWEN3),
        "dynamic positions": Case(CACHE, DYNAMIC),
        "a window": Case(CACHE, {**QWEN3, "sliding_window": SEG_LEN - 1}),
        "a window, the same length": Case(CACHE, {**QWEN3, "sliding_window": SEG_LEN + 1, "same_length": True}),
        "post-norm": Case(CACHE, norm="post"),
        "one row kept": Case({"kind": "transformer_xl", "mem_len": 1}),
        "the same length": Case(CACHE, {"same_length": True}),
        "the same length, rotary": Case({**CACHE, "positions": "rotary"}, {"same_length": True}),
        "the same length, lamemo": Case(small_block("lamemo"), {"same_length": True}),
        "the same length, memorizing": Case(small_block("memorizing"), {"same_length": True}),
        "clamped distances": Case(CACHE, {"clamp_len": 3}),
        "clamped distances, lamemo": Case(small_block("lamemo"), {"clamp_len": 3}),
        "clamped distances, rmt": Case(small_block("rmt", mem_len=SEG_LEN), {"clamp_len": 3}),
        "a token does not see itself": Case(unseen),
        "a token does not see itself, the same length": Case(unseen, {"same_length": True}),
        "empty rows": Case(small_block("block_recurrent", window=None, attend_empty=True)),
        "no gate of an empty memory": Case(small_block("infini", gate_empty=False)),
        "alibi only beyond the segment": Case(small_block("compressive", positions="alibi_memory"), GPT2),
        "an adaptive vocabulary": Case(CACHE, {"adaptive": AdaptiveConfig(cutoffs=[4, 8], div_val=2)}),
        "lamemo in GPT-2": Case(small_block("lamemo"), {**GPT2, "token_types": TYPES}),
        "GPT-2": Case({"kind": "causal"}, {**GPT2, "token_types": TYPES}),
        "the infinity-former in GPT-2": Case(small_block("infinite", over={"kind": "causal"}), GPT2),
        "blocks that differ": Case(
            {"kind": "per_block", "default": CACHE, "0": CASES["linear"], "2": {"kind": "none"}}
        ),
    }


def by_day() -> list[ParameterSet]:
    """Return all cases; of the further variants of a memory all but one of block_recurrent's are nightly."""
    variants = CASES.keys() - KINDS - {"block_recurrent, one window"}
    return [pytest.param(case, marks=[pytest.mark.nightly] if case in variants else []) for case in cases()]


def trained_model(case: str, dtype: torch.dtype = torch.float64) -> TrainedModel:
    tokenizer = WordTokenizer([f"w{number}" for number in range(VOCAB - 1)])
    checkpoint: Any = None
    config = Config(train=TrainConfig(seg_len=SEG_LEN))
    return TrainedModel(cases()[case].model(dtype), tokenizer, config, checkpoint, torch.device("cpu"), dtype)


@pytest.mark.parametrize("case", [case for case in cases() if case not in CASES])  # of those, see the contract's tests
def test_a_row_is_that_of_the_whole_segment_at_every_place(case: str) -> None:
    """From an empty memory and a full one, by one row and by two, the lanes at different places.

    Lanes that are run together end apart; a block may return anything for the rows that they do not have.
    """
    subject = cases()[case].subject()
    assert subject.model().can_step
    further_rows_are_those_of_the_whole_segment(subject)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = [0, 1, SEG_LEN - 1, SEG_LEN, 3 * SEG_LEN + 2]
    return [torch.randint(0, VOCAB - 1, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("case", by_day())
def test_a_text_is_that_of_recomputation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over borders of segments, in lanes of different lengths of which some stop; what a lane has read is run in parts.

    After every token, stepping on from the reading gives the same as the present way to read.
    """
    trained = trained_model(case)
    monkeypatch.setattr(writing, "NUM_ROWS", 2)
    reading = read(trained, start(trained, len(prompts())), prompts())
    free: dict[str, Any] = {"num_tokens": 2 * SEG_LEN + 3, "sampling": GREEDY if case == "lamemo" else SAMPLED}
    steps = list(stream(trained, reading, **free))
    for made in steps:
        stepped = SteppingWriter(trained, made.reading).next_log_probs()
        torch.testing.assert_close(stepped, next_log_probs(trained, made.reading), rtol=0, atol=1e-10)
    stopping = {**free, "stop_ids": steps[2].tokens[1:2].tolist()}
    some_stop = list(stream(trained, reading, **stopping))
    monkeypatch.setattr(MemoryLM, "can_step", False)
    check_same(steps, list(stream(trained, reading, **free)))
    check_same(some_stop, list(stream(trained, reading, **stopping)))


def check_same(steps: Sequence[NextTokens], expected: Sequence[NextTokens]) -> None:
    for made, other in zip(steps, expected, strict=True):
        assert torch.equal(made.writing, other.writing)
        assert torch.equal(made.tokens[made.writing], other.tokens[made.writing])
        assert torch.equal(made.reading.open_tokens, other.reading.open_tokens)
        assert torch.equal(made.reading.open_len, other.reading.open_len)
        first, second = named_tensors(made.reading.state), named_tensors(other.reading.state)
        for name, part in first.items():
            torch.testing.assert_close(part, second[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", by_day())
def test_what_is_carried_is_that_of_reading_the_text_to_the_last_bit(case: str) -> None:
    trained = trained_model(case, torch.float32)
    begun = read(trained, start(trained, 2), [prompts()[-1], prompts()[-1].flip(0)])
    written = generate(trained, begun, num_tokens=3 * SEG_LEN, sampling=SAMPLED)
    assert same_reading(written.reading, read(trained, begun, written.tokens))


@torch.no_grad()
def test_rows_taken_out_of_a_memory_stay_out() -> None:
    trained = trained_model("transformer_xl")
    reading = read(trained, start(trained, 2), [torch.arange(3 * SEG_LEN) % 9] * 2)
    begin, end = torch.tensor([-SEG_LEN, 0]), torch.tensor([-1, 0])
    memories = zip(trained.model.memories(), reading.state.blocks, strict=True)
    blocks = tuple(memory.forget(part, begin, end) for memory, part in memories if isinstance(memory, Inspectable))
    forgotten = Reading(LMState(blocks, (), ()), *reading[1:])
    found = SteppingWriter(trained, forgotten).next_log_probs()
    torch.testing.assert_close(found, next_log_probs(trained, forgotten), rtol=0, atol=1e-10)
    differs = (found - SteppingWriter(trained, reading).next_log_probs()).abs().amax(1) > 1e-6
    assert differs.tolist() == [True, False]


def test_a_class_that_only_inherits_the_step_is_recomputed() -> None:
    """Its forward may be another function."""
    assert issubclass(Logging, TransformerXL) and Logging.can_step
    model = cases()["transformer_xl"].model()
    assert model.can_step
    for memory in model.memories():
        memory.__class__ = Logging
    assert not model.can_step


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("titans, context", "every token adds two keys"),
        ("block_recurrent", "a segment has two windows"),
        ("lamemo, published window", "memory rows see one key more with every token"),
    ],
)
def test_what_cannot_step_is_recomputed(case: str, why: str) -> None:
    assert not small_model(case).can_step, why

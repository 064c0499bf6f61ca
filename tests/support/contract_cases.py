"""Small instances of every memory, variant and composition, for the tests of the memory contract."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from dist_mem.contract.check_memory import RULES
from dist_mem.contract.subject import CheckedMemory, SubjectSize, total_loss
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import Memory, named_tensors
from dist_mem.model import LMOutput, LMState, MemoryLM

LANES, SEG_LEN = 4, 4
SIZE = SubjectSize(lanes=LANES, seg_len=SEG_LEN, segments=4, layers=3)


def small_block(kind: str, **options: Any) -> dict[str, Any]:
    """Return a small `memory:` block that fits segments of SEG_LEN."""
    return {"kind": kind, **memory_class(kind).small_options(SEG_LEN), **options}


# Every memory of the package by its file name, and further variants and compositions.
CASES: dict[str, dict[str, Any]] = {
    **{kind: small_block(kind) for kind in memory_kinds()},
    "block_recurrent, one window": small_block("block_recurrent", window=None, gate="lstm", cell="dual"),
    "block_recurrent, single": small_block("block_recurrent", gate="lstm", cell="single", attend_empty=True),
    "causal, convolution": small_block("causal", kernel=3),
    "none, convolution": small_block("none", kernel=3),
    "transformer_xl, convolution": small_block("transformer_xl", kernel=3),
    "transformer_xl, rotary, wide convolution": small_block(
        "transformer_xl", mem_len=SEG_LEN, positions="rotary", kernel=SEG_LEN + 3
    ),
    "compressive, convolution": small_block("compressive", kernel=3),
    "compressive, alibi, wide convolution": small_block("compressive", positions="alibi", kernel=2 * SEG_LEN + 3),
    "lamemo, convolution": small_block("lamemo", kernel=3),
    "lamemo, no look-ahead, convolution": small_block("lamemo", look_ahead=False, kernel=3),
    "rmt, convolution": small_block("rmt", kernel=3),
    "rmt, cache, wide convolution": small_block("rmt", mem_len=SEG_LEN - 1, read_cache=True, kernel=SEG_LEN + 3),
    "infini, convolution": small_block("infini", kernel=3),
    "infini over causal": small_block("infini", over={"kind": "causal"}, gate="tanh", gate_init=-0.5),
    "memorizing, convolution": small_block("memorizing", kernel=SEG_LEN + 3),
    "memorizing over causal": small_block("memorizing", over={"kind": "causal"}, gate="tanh", gate_init=-0.5),
    "block_recurrent, convolution": small_block("block_recurrent", kernel=3),
    "block_recurrent, one window, convolution": small_block("block_recurrent", window=None, kernel=SEG_LEN + 3),
    "infinite over transformer_xl, convolution": small_block(
        "infinite", over={"kind": "transformer_xl", "mem_len": SEG_LEN, "kernel": 3}
    ),
    "compressive, dilated": small_block("compressive", compression="dilated", compression_loss="autoencoder"),
    "compressive, most used": small_block("compressive", compression="most_used"),
    "compressive, alibi": small_block("compressive", positions="alibi"),
    "infinite over causal": small_block("infinite", over={"kind": "causal"}),
    "infinite, sticky": small_block("infinite", sampling="sticky"),
    "infinite, moments": small_block("infinite", density="softmax_moments", sampling="stratified"),
    "infinite, as printed": small_block(
        "infinite", density_bias=True, projections="heads", kl_heads="sum", padding="none", store="normed"
    ),
    "infinite, normed over causal": small_block("infinite", over={"kind": "causal"}, store="normed", gate=False),
    "infinite, normed over compressive": small_block("infinite", over=small_block("compressive"), store="normed"),
    "infinite over infini": small_block("infinite", over={"kind": "infini"}),
    "infinite over transformer_xl": small_block("infinite", over={"kind": "transformer_xl", "mem_len": SEG_LEN}),
    "infinite over compressive": small_block("infinite", over=small_block("compressive"), sampling="stratified"),
    "infinite over lamemo": small_block("infinite", over=small_block("lamemo", mem_len=SEG_LEN), sampling="sticky"),
    "per block": {
        "kind": "per_block",
        "default": small_block("compressive"),
        "0": {"kind": "none"},
        "1": small_block("infinite", over={"kind": "transformer_xl", "mem_len": SEG_LEN}),
    },
    "per block, with gradient": {
        "kind": "per_block",
        "default": {"kind": "infini"},
        "1": {"kind": "transformer_xl", "mem_len": SEG_LEN},
    },
    "linear, kimi delta": small_block("linear", decay="vector", gate="sigmoid", low_rank_gate=True),
    "linear, mamba-2": small_block(
        "linear",
        num_key_heads=1,
        delta=False,
        write="step",
        unit_keys=False,
        scale_queries=False,
        skip=True,
        norm="after_gate",
    ),
    "linear over transformer_xl": small_block(
        "linear", over={"kind": "transformer_xl", "mem_len": 2 * SEG_LEN - 1}, over_gate_init=0.5
    ),
    "linear over compressive": small_block(
        "linear", over=small_block("compressive", mem_len=2 * SEG_LEN), over_gate_init=0.5
    ),
    "infinite over linear over causal": small_block(
        "infinite", over=small_block("linear", over={"kind": "causal"}, over_gate_init=0.5)
    ),
    "titans, context": small_block("titans", variant="context"),
    "titans, layer": small_block("titans", variant="layer"),
    "titans, alone": small_block("titans", variant="alone", depth=1),
    "titans, without convolution": small_block("titans", kernel=1, chunk_len=1),
    "titans, recomputed": small_block("titans", gradients="recomputed"),
    "infinite over titans": small_block("infinite", over=small_block("titans")),
    "titans over causal": small_block("titans", variant="alone", depth=1, over={"kind": "causal"}, over_gate_init=0.5),
    "transformer_xl, rotary": small_block("transformer_xl", positions="rotary"),
    "lamemo, shorter than a segment": small_block("lamemo", mem_len=SEG_LEN - 1),
    "lamemo, published window": small_block("lamemo", mem_len=2 * SEG_LEN - 1, window="segment"),
    "lamemo, shared positions": small_block("lamemo", positions="shared"),
    "lamemo, no look-ahead": small_block("lamemo", look_ahead=False),
    "lamemo, epsilon": small_block("lamemo", epsilon=1e-2),
    "memorizing, buckets of empty rows": small_block("memorizing", search="buckets", empty_rows=True, positions="none"),
    "memorizing, bf16 rows, no cache": small_block(
        "memorizing", mem_len=SEG_LEN - 1, cache_len=0, rows_dtype="bf16", gate_empty=False
    ),
    "memorizing, long cache": small_block("memorizing", cache_len=2 * SEG_LEN + 1),
    "lamemo, no interpolation": small_block("lamemo", mem_len=SEG_LEN, interpolation=False),
    "infinite over rmt": small_block("infinite", over=small_block("rmt")),
    "armt over causal, heads": small_block("armt", over={"kind": "causal"}, num_heads=2, gating=True, nu=1),
    "armt, first release": small_block("armt", variant="first_release"),
    "armt, paper": small_block("armt", variant="paper"),
    "infinite over armt": small_block("infinite", over=small_block("armt")),
    "rmt_rows over causal, one": small_block("rmt_rows", num_tokens=1, over={"kind": "causal"}),
    "infinite over rmt_rows": small_block("infinite", over=small_block("rmt_rows")),
    "rmt, cache": small_block("rmt", mem_len=2 * SEG_LEN + 3),
    "rmt, read cache": small_block("rmt", num_tokens=4, mem_len=SEG_LEN - 1, read_cache=True),
    "rmt, not at end": small_block("rmt", num_tokens=2, mem_len=SEG_LEN, read_cache=True, at_end=False),
    "rmt, one token": small_block("rmt", num_tokens=1),
    "infinite, gibbs": small_block("infinite", density="gibbs", sampling="sticky", store="normed"),
    "infinite, gibbs over transformer_xl": small_block(
        "infinite", density="gibbs", gibbs_boxes="published", over={"kind": "transformer_xl", "mem_len": SEG_LEN}
    ),
}


# Further variants that differ most from their memory in what they keep: another choice of what is kept, another window,
# and memories in two layers of which each is of another kind. And blocks whose memories differ.
MET_BY_ALL = {"compressive, most used", "infinite over compressive", "infinite over lamemo", "per block"}


def case_params(cases: Iterable[str] = CASES, *, every: bool = False) -> list[ParameterSet]:
    """Return cases as parameters of a test; of further variants all but those of MET_BY_ALL are nightly.

    With `every` none is: for what states a property of the memory itself and not of what uses memories.
    """
    by_day = {*memory_kinds(), *MET_BY_ALL}
    return [pytest.param(case, marks=() if every or case in by_day else pytest.mark.nightly) for case in cases]


def in_turn(cases: Iterable[str], others: Sequence[Any]) -> list[ParameterSet]:
    """Return the product of cases and other values as parameters of a test.

    Each memory of the package meets one value in every `make test` (`core`), so that all values are met by some, and
    two meet all; the others as the budget allows. A further variant meets one value by day, and the others at night.
    """
    kinds = memory_kinds()
    whole = {"transformer_xl", "infini"}  # rows that are constants, and a state that carries a gradient

    def marks(case: str, is_its_turn: bool) -> list[pytest.MarkDecorator]:
        if case in kinds:
            return [pytest.mark.core] if is_its_turn or case in whole else []
        return [] if is_its_turn else [pytest.mark.nightly]

    return [
        pytest.param(case, other, marks=marks(case, (number - index) % len(others) == 0))
        for number, case in enumerate(cases)
        for index, other in enumerate(others)
    ]


@cache
def memories_of(case: str) -> list[Memory]:
    """Return memories to ask for their attributes; nobody may change them."""
    return small_model(case).memories()


def carrying() -> list[str]:
    """Return the cases in which gradients flow through a state (`train.bptt_segments`)."""
    return [case for case in CASES if any(memory.carries_gradient for memory in memories_of(case))]


def takes_short_first(case: str) -> bool:
    """Return whether the memory of the first layer accepts documents that are cut from their end."""
    return all(memory.takes_short_first for memory in memories_of(case))


def accepted(case: str, back_end: str) -> bool:
    """Return whether the memory can attend by this back end.

    Titans' learned rows are outside of its window, unless it is alone, which takes a mask; look-ahead attention needs
    more than sdpa returns.
    """
    if back_end == "simple" or case == "titans, alone":
        return True
    return "lamemo" not in case if back_end == "sdpa" else "titans" not in case


def subject(case: str, norm: str = "pre", cut: str = "start", attention: str = "auto") -> CheckedMemory:
    """Return the subject of the contract's rules for a case."""
    return CheckedMemory(lambda _: CASES[case], SIZE, norm, cut, attention)


def check_rules(subject: CheckedMemory) -> None:
    """Check all rules of the contract.

    Raises:
        AssertionError: names the rules that are broken, or cannot be checked.
    """
    broken = []
    for rule in RULES:
        try:
            rule.check(subject)
        except Exception as error:  # any error of the memory
            broken.append((rule.statement, error))
    assert not broken, broken


def computed(model: MemoryLM, outputs: Iterable[LMOutput]) -> dict[str, Tensor]:
    """Return losses and states of segments that were read, and the gradients of the sum of their losses."""
    read = list(outputs)
    torch.stack([total_loss(output) for output in read]).sum().backward()
    found = {f"nll {number}": output.nll.detach() for number, output in enumerate(read)}
    for number, output in enumerate(read):
        found |= {f"{name} after {number}": part for name, part in named_tensors(output.state).items()}
    return found | {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, case: object) -> None:
    """Compare what `computed` returns; errors are relative to the largest number of a tensor."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted.numel():
            error = (found[name].double() - wanted.double()).abs().max()
            assert error <= tolerance * wanted.double().abs().max().clamp(min=1e-3), (case, name, error)


def small_model(case: str, *, norm: str = "pre", cut: str = "start") -> MemoryLM:
    return subject(case, norm, cut).model()


def random_segments(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of random tokens and targets, each (LANES, SEG_LEN)."""
    return subject("none").segments(seed)


def full_lanes() -> Tensor:
    return torch.full((LANES,), SEG_LEN)


def fresh_state(model: MemoryLM, dtype: torch.dtype = torch.float32) -> LMState:
    return model.init_state(torch.arange(LANES), "cpu", dtype)


def read(model: MemoryLM, segments: list[tuple[Tensor, Tensor]], state: LMState) -> Iterator[LMOutput]:
    """Read complete segments one after the other; yield the output of each."""
    return subject("none").read(model, segments, state)

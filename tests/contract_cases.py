"""Small models, states and segments for the tests of the memory contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dist_mem.config import Config, ModelConfig, TrainConfig
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import map_state, named_tensors
from dist_mem.model import LMOutput, LMState, MemoryLM

VOCAB, WIDTH, LANES, SEG_LEN, SEGMENTS = 11, 12, 4, 4, 4


def small_block(kind: str, **options: Any) -> dict[str, Any]:
    """The `memory:` block of a memory that fits the segments here."""
    return {"kind": kind, **memory_class(kind).small_options(SEG_LEN), **options}


# Every memory of the package by its file name, and what is tested besides: variants and compositions.
CASES: dict[str, dict[str, Any]] = {
    **{kind: small_block(kind) for kind in memory_kinds()},
    "compressive, dilated": small_block("compressive", compression="dilated", compression_loss="autoencoder"),
    "compressive, most used": small_block("compressive", compression="most_used"),
    "infinite, sticky": small_block("infinite", sampling="sticky"),
    "infinite over transformer_xl": small_block("infinite", over={"kind": "transformer_xl", "mem_len": SEG_LEN}),
    "infinite over compressive": small_block("infinite", over=small_block("compressive"), sampling="stratified"),
    "infinite over lamemo": small_block("infinite", over=small_block("lamemo", mem_len=SEG_LEN), sampling="sticky"),
    "lamemo, shorter than a segment": small_block("lamemo", mem_len=SEG_LEN - 1),
    "lamemo, published window": small_block("lamemo", mem_len=2 * SEG_LEN - 1, window="segment"),
    "lamemo, shared positions": small_block("lamemo", positions="shared"),
    "lamemo, no look-ahead": small_block("lamemo", look_ahead=False),
    "lamemo, no interpolation": small_block("lamemo", mem_len=SEG_LEN, interpolation=False),
}


def small_model(case: str, *, norm: str = "pre", dropout: float = 0.0, checkpointing: bool = False) -> MemoryLM:
    """Three blocks with large weights: attention far from uniform shows what small weights hide."""
    model = ModelConfig(num_layers=3, d_model=WIDTH, num_heads=2, d_head=5, d_inner=16, norm=norm, dropout=dropout)
    train = TrainConfig(seg_len=SEG_LEN, activation_checkpointing=checkpointing)
    model.init_std = 0.5
    torch.manual_seed(0)
    return MemoryLM(Config(model=model, memory=CASES[case], train=train), VOCAB)


def random_segments(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """SEGMENTS pairs of tokens and targets, each (LANES, SEG_LEN)."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, VOCAB, (SEGMENTS, 2, LANES, SEG_LEN), generator=generator)
    return [(tokens, targets) for tokens, targets in draw]


def full_lanes() -> Tensor:
    return torch.full((LANES,), SEG_LEN)


def fresh_state(model: MemoryLM, dtype: torch.dtype = torch.float32) -> LMState:
    return model.init_state(torch.arange(LANES), "cpu", dtype)


def read(model: MemoryLM, segments: list[tuple[Tensor, Tensor]], state: LMState) -> Iterator[LMOutput]:
    """Complete segments, one after the other."""
    for tokens, targets in segments:
        output = model(tokens, targets, full_lanes(), state=state)
        state = output.state
        yield output


def warm_state(model: MemoryLM) -> LMState:
    """A state after enough segments to fill a small memory."""
    with torch.no_grad():
        return list(read(model, random_segments(99), fresh_state(model)))[-1].state


def copied(state: Any) -> Any:
    return map_state(torch.clone, state)


def assert_same(state: Any, other: Any, lanes: Any = slice(None)) -> None:
    """Bitwise, in the given lanes."""
    first, second = named_tensors(state), named_tensors(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name][lanes], second[name][lanes]), name


def total_loss(output: LMOutput) -> Tensor:
    return output.nll.sum() + sum(loss.sum() for loss in output.aux.values())


class Partitioned:
    """ZeRO-3 in small: a parameter has its value only while a module that registers it runs its forward.

    Elsewhere it is empty, as under ZeRO-3, or NaN: that shows uses an empty tensor lets pass, like `0 * p.sum()`.
    """

    def __init__(self, model: nn.Module, *, elsewhere: str) -> None:
        self.full = {parameter: parameter.data for parameter in model.parameters()}
        self.users = dict.fromkeys(self.full, 0)
        self.elsewhere = elsewhere
        for parameter in self.full:
            self.release(parameter)
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, _: self.count(module, 1))
            module.register_forward_hook(lambda module, _, __: self.count(module, -1))

    def release(self, parameter: nn.Parameter) -> None:
        full = self.full[parameter]
        parameter.data = torch.empty(0) if self.elsewhere == "empty" else torch.full_like(full, torch.nan)

    def count(self, module: nn.Module, change: int) -> None:
        for parameter in module.parameters(recurse=False):
            self.users[parameter] += change
            if self.users[parameter]:
                parameter.data = self.full[parameter]
            else:
                self.release(parameter)

"""Test material for the rules of the memory contract: small models around one memory, segments, states.

A rule takes a `CheckedMemory` and raises `BrokenRuleError` if the memory breaks it. Shape letters: B lanes, T segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.block import model_spec
from dist_mem.config import Config, DataConfig, ModelConfig, TrainConfig
from dist_mem.data.batch import IGNORE
from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.model import LMOutput, LMState, MemoryLM

Segment = tuple[Tensor, Tensor]  # tokens and targets, both (lanes, seg_len) int64
VOCAB = 11


class BrokenRuleError(AssertionError):
    """Raised by a rule that the memory breaks."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        """`cause`: the cause, if the rule has found it; None: the usual one."""
        super().__init__(message)
        self.cause = cause


class SubjectSize(NamedTuple):
    """Sizes of the model and the data that a rule is checked with."""

    lanes: int
    seg_len: int
    segments: int
    layers: int


@dataclass(frozen=True)
class CheckedMemory:
    """A memory and the sizes that it is checked with."""

    block: Callable[[int], dict[str, Any]]  # segment length -> the `memory:` block of the configuration
    size: SubjectSize
    norm: str = "pre"
    cut: str = "start"  # as `data.cut`; end: the first segment that is read is short in most lanes
    attention: str = "auto"  # as `model.attention`
    keys: Mapping[str, Any] = field(default_factory=dict)  # further keys of `model`

    def config(self, *, dropout: float = 0.0, checkpointing: str = "none") -> Config:
        """Return the configuration of `model`."""
        widths = {"d_model": 12, "num_heads": 2, "d_head": 5, "d_inner": 16}
        own = {"norm": self.norm, "dropout": dropout, "attention": self.attention, "init_std": 0.5}
        model = ModelConfig(num_layers=self.size.layers, **{**own, **widths, **self.keys})
        train = TrainConfig(seg_len=self.size.seg_len, activation_checkpointing=checkpointing)
        data = DataConfig(cut=self.cut)
        return Config(data=data, model=model, memory=self.block(self.size.seg_len), train=train)

    def model(self, *, dropout: float = 0.0, checkpointing: str = "none") -> MemoryLM:
        """Return a model with large weights: attention far from uniform reveals bugs that small weights hide."""
        torch.manual_seed(0)
        return MemoryLM(model_spec(self.config(dropout=dropout, checkpointing=checkpointing), VOCAB))

    def segments(self, seed: int = 0) -> list[Segment]:
        """Return random segments for all lanes."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.size.segments, 2, self.size.lanes, self.size.seg_len)
        return [(tokens, targets) for tokens, targets in torch.randint(0, VOCAB, shape, generator=generator)]

    def full_lengths(self) -> Tensor:
        """Return `valid_len` of complete segments."""
        return torch.full((self.size.lanes,), self.size.seg_len)

    def ragged_lengths(self) -> Tensor:
        """Return `valid_len` of a complete segment, an idle lane and incomplete ones, cut to the number of lanes."""
        lengths = [self.size.seg_len, 0, self.size.seg_len - 1, 1]
        return torch.tensor([lengths[lane % 4] for lane in range(self.size.lanes)])

    def lengths(self, number: int) -> Tensor:
        """Return `valid_len` of segment `number` of documents: T, but less for the first if cut from the end."""
        return self.ragged_lengths().clamp(min=1) if self.cut == "end" and number == 0 else self.full_lengths()

    def empty_state(self, model: MemoryLM, dtype: torch.dtype = torch.float32) -> LMState:
        """Return empty memories."""
        return model.init_state(torch.arange(self.size.lanes), "cpu", dtype)

    def read(
        self,
        model: MemoryLM,
        segments: list[Segment] | None = None,
        state: LMState | None = None,
        *,
        is_window: bool = False,
    ) -> Iterator[LMOutput]:
        """Read segments of documents one after the other, and yield the outputs; by default from empty memories.

        Args:
            is_window: gradients may flow through the states between them.
        """
        state = self.empty_state(model) if state is None else state
        for number, (tokens, targets) in enumerate(self.segments() if segments is None else segments):
            output = model(tokens, targets, self.lengths(number), state=state)
            state = output.state if is_window else detach_state(output.state)
            yield output

    @torch.no_grad()
    def losses(self, model: MemoryLM, *, altered: int | None = None) -> Tensor:
        """Return the loss of every token read, (lanes, tokens), with another token of every lane at place `altered`."""
        segments = self.segments()
        if altered is not None:
            column = segments[altered // self.size.seg_len][0][:, altered % self.size.seg_len]
            column.copy_((column + 1) % VOCAB)
        return torch.cat([output.nll for output in self.read(model, segments)], dim=1)

    def warm(self, model: MemoryLM, dtype: torch.dtype = torch.float32) -> LMState:
        """Return memories after enough segments to fill small ones."""
        with torch.no_grad():
            return list(self.read(model, self.segments(99), self.empty_state(model, dtype)))[-1].state

    def layer_inputs(self, model: MemoryLM, state: LMState) -> Tensor:
        """Return a block's input: the rows of the stem, then random rows."""
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(self.size.lanes, self.size.seg_len, 12, generator=generator)
        return model.stem(rows, state.stem)[0]


def require(condition: bool | Tensor, message: str) -> None:
    """Raise BrokenRuleError with the message unless the condition holds."""
    if not bool(condition):
        raise BrokenRuleError(message)


def require_same(state: Any, other: Any, message: str, lanes: Any = slice(None)) -> None:
    """Raise BrokenRuleError unless two states have the same bits in the given lanes."""
    first, second = named_tensors(state), named_tensors(other)
    require(first.keys() == second.keys(), f"{message}: fields {sorted(first)} and {sorted(second)}")
    for name in first:
        require(torch.equal(first[name][lanes], second[name][lanes]), f"{message}: field {name} differs")


def total_loss(output: LMOutput) -> Tensor:
    """Return the sum of all losses that are trained on."""
    return output.nll.sum() + sum(loss.sum() for loss in output.aux.values())


def ignore_padding(targets: Tensor, valid_len: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets that ignore the padding, and the mask of the padding."""
    padding = torch.arange(targets.shape[1]) >= valid_len[:, None]
    return targets.masked_fill(padding, IGNORE), padding


class PartitionedModel:
    """A small imitation of ZeRO-3: a parameter has its value only while a module that registers it runs its forward.

    Otherwise it is empty, as under ZeRO-3, or NaN, which reveals uses that an empty tensor allows, like `0 * p.sum()`.
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

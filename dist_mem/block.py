"""A transformer block: a memory layer (attention) and a feed-forward layer, and how it runs in training.

In training a part of a block may be recomputed in the backward instead of being saved
(`train.activation_checkpointing`), and be compiled (`train.compile`). Without gradient a block runs as it is written.
Whole functions of a block are compiled, so the hooks of ZeRO, which gather its parameters, stay outside of the graphs.
Shape letters: B lanes, T segment, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from dist_mem.config import Config, ModelConfig, TrainConfig
from dist_mem.config.schema import BY_SEGMENTS, ParameterGroupConfig
from dist_mem.memory import build_memory
from dist_mem.memory.base import LayerSpec, Memory, MemoryState, Opened, Places
from dist_mem.nn.compilation import compile_or_note
from dist_mem.nn.family import family_of, llama_spec
from dist_mem.nn.layers import Dropout
from dist_mem.nn.low_rank import add_low_rank
from dist_mem.nn.norms import make_norm

_REHEARSES: ContextVar[bool] = ContextVar("rehearses")


@contextmanager
def rehearsal() -> Iterator[None]:
    """Without gradient, let blocks compute what they compute with one: engine/window.py computes the same again.

    Memories have auxiliary losses only with a gradient, and compiled blocks may draw other random numbers without.
    """
    token = _REHEARSES.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _REHEARSES.reset(token)


class BlockOutput(NamedTuple):
    y: Tensor  # (B, T, D), with the rows of a stem around it, if any
    state: MemoryState  # of the memory
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane
    logs: dict[str, Tensor]  # name -> (B,) float32, without gradient


class Block(nn.Module):
    """Memory layer (attention) and feed-forward, each with its residual and its norm.

    With pre-norm the memory normalises its input, because stored and new rows pass through the same norm.
    """

    def __init__(
        self,
        memory: Memory,
        feed_forward: nn.Module,
        dropout: float = 0.0,
        *,
        recomputed: str = "none",
        is_compiled: bool = False,
    ) -> None:
        """Make a block.

        Args:
            dropout: of the memory's output, including a long-term memory's reading, after its own dropout.
            recomputed: none | blocks | attention | feed_forward: what the backward recomputes of this block.
            is_compiled: compile the block in training. What is recomputed is a graph of its own: recomputation inside
                of one would draw another dropout.
        """
        super().__init__()
        spec = memory.spec
        self.pre_norm = spec.norm == "pre"
        self.recomputed = recomputed
        self.is_compiled = is_compiled
        self.has_run = False
        self.memory = memory
        self.dropout = Dropout(dropout)
        self.attention_norm = nn.Identity() if self.pre_norm else make_norm(spec.d_model, rms_eps=spec.rms_eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = make_norm(spec.d_model, rms_eps=spec.rms_eps)

    def forward(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> BlockOutput:
        if self.recomputed in ("none", "blocks"):
            whole: BlockOutput = self.run(Block.run_whole, x, state, valid_len, recompute=self.recomputed == "blocks")
            return whole
        attended = self.run(Block.attend, x, state, valid_len, recompute=self.recomputed == "attention")
        y = self.run(Block.feed, attended.y, recompute=self.recomputed == "feed_forward")
        return attended._replace(y=y, state=self.memory.after_block(y, attended.state))

    def run(self, part: Callable[..., Any], *inputs: Any, recompute: bool) -> Any:
        """Run a part of this block, one of its functions below; without gradient as it is written."""
        if not torch.is_grad_enabled():
            return self.rehearse(part, *inputs) if _REHEARSES.get(False) else part(self, *inputs)
        if self.is_compiled:
            self.run_once(part, *inputs)
            part = compile_or_note(part)
        return checkpoint(part, self, *inputs, use_reentrant=False) if recompute else part(self, *inputs)

    @torch.enable_grad()
    def rehearse(self, part: Callable[..., Any], x: Tensor, *inputs: Any) -> Any:
        """Run a part as with a gradient, and drop its graph."""
        output = self.run(part, x.detach().requires_grad_(), *inputs, recompute=False)
        return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, output)

    def run_once(self, part: Callable[..., Any], x: Tensor, *inputs: Any) -> None:
        """Before a part is compiled, run it as it is written: memories then compute constants and cache them."""
        if not self.has_run:
            devices = [x.device] if x.device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices):
                part(self, x, *inputs)
        self.has_run = True

    def run_whole(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> BlockOutput:
        """Run both sub-layers."""
        attended, new, aux, logs = self.attend(x, state, valid_len)
        y = self.feed(attended)
        state = self.memory.after_block(y, new)
        return BlockOutput(y, state, aux, logs)  # not _replace, which torch 2.11 cannot compile

    def attend(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> BlockOutput:
        """Run the memory layer, with its residual."""
        y, state, aux, _, _, logs = self.memory(x, state, valid_len)
        behind = x if x.shape[1] == y.shape[1] else x[:, -y.shape[1] :]  # even the gradient of a whole slice is a copy
        attended = self.attention_norm(behind + self.dropout(y))
        values = {name: value.detach().float().expand(len(x)) for name, value in logs.items()}
        return BlockOutput(attended, state, aux, values)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> tuple[Tensor, Opened]:
        """Run further rows of an open segment, x (B, R, D), through both sub-layers, see `Memory.step_rows`."""
        y, _, opened = self.memory.step_rows(x, opened, places)
        return self.feed(self.attention_norm(x + y)), opened

    def feed(self, attended: Tensor) -> Tensor:
        """Run the feed-forward layer, with its residual: (B, T, D) -> (B, T, D)."""
        if self.pre_norm:
            return attended + self.feed_forward(self.feed_forward_norm(attended))
        normed: Tensor = self.feed_forward_norm(attended + self.feed_forward(attended))
        return normed


def any_compiled(model: nn.Module) -> bool:
    """Return whether training compiles blocks of the model."""
    return any(block.is_compiled for block in model.modules() if isinstance(block, Block))


def compile_blocks_of(model: nn.Module, is_compiled: bool) -> None:
    """Compile all blocks of the model in training, or run them as they are written."""
    for block in model.modules():
        if isinstance(block, Block):
            block.is_compiled = is_compiled


def num_recomputed(num_layers: int, share: float) -> int:
    """Return how many blocks, the first ones, `train.activation_checkpointing_share` selects; at least one."""
    return math.ceil(share * num_layers - 1e-9)


class ModelSpec(NamedTuple):
    """What a model is built from."""

    model: ModelConfig
    memory: Mapping[str, Any]  # the block with all options
    train: TrainConfig  # for the length of segments, the seed, and how blocks run in training
    cut: str  # as `data.cut`
    vocab_size: int
    groups: Sequence[ParameterGroupConfig] = ()  # of the optimizer, which say what is frozen: a backward does less
    trained_memory: Mapping[str, Any] | None = None  # blocks equal in it share parameters; None: as in `memory`


def model_spec(config: Config, vocab_size: int) -> ModelSpec:
    """Return what the model of a configuration is built from."""
    groups = config.optimizer.groups
    return ModelSpec(config.model, config.memory, config.train, config.data.cut, vocab_size, groups)


def make_block(spec: ModelSpec, layer_index: int) -> Block:
    """Return block `layer_index`, with its memory."""
    model, train = spec.model, spec.train
    family = family_of(model)
    layer = layer_spec(spec, layer_index)
    recomputed = train.activation_checkpointing
    is_saved = layer_index >= num_recomputed(model.num_layers, train.activation_checkpointing_share)
    training: dict[str, Any] = {
        "recomputed": "none" if is_saved else BY_SEGMENTS.get(recomputed, recomputed),
        "is_compiled": train.compile is True,  # else the engine decides, which has a device
    }
    feed_forward = family.feed_forward(model.d_model, d_inner=model.d_inner, dropout=model.dropout)
    if family.is_published:  # dropout of the sum
        memory = build_memory(spec.memory, replace(layer, dropout=0.0))
        if model.lora is not None:
            add_low_rank(getattr(lowest_memory(memory), "attention", nn.Identity()), feed_forward, model.lora)
        return Block(memory, feed_forward, model.dropout, **training)
    return Block(build_memory(spec.memory, layer), feed_forward, **training)


def lowest_memory(memory: Memory) -> Memory:
    """Return the memory at the end of `over`, which has the attention."""
    while isinstance(below := getattr(memory, "over", None), Memory):
        memory = below
    return memory


def layer_spec(spec: ModelSpec, layer_index: int) -> LayerSpec:
    """Return the shapes and options of the memory of block `layer_index`."""
    model, train = spec.model, spec.train
    if model.norm not in ("pre", "post"):
        raise ValueError(f"model.norm is {model.norm!r}, but must be pre or post")
    if model.d_head is None and model.d_model % model.num_heads:
        raise ValueError(
            f"model.d_model is {model.d_model}, no multiple of model.num_heads = {model.num_heads}; give model.d_head"
        )
    return LayerSpec(
        layer_index=layer_index,
        num_layers=model.num_layers,
        d_model=model.d_model,
        num_heads=model.num_heads,
        d_head=model.d_head or model.d_model // model.num_heads,
        seg_len=train.seg_len,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        norm=model.norm,
        clamp_len=model.clamp_len,
        same_length=model.same_length,
        seed=train.seed,
        back_end=model.attention,
        short_first=spec.cut == "end",
        tf32=train.tf32,
        llama=llama_spec(model),
    )

"""MemoryLM: embed -> blocks, each with its memory -> softmax -> one negative log-likelihood per token.

The model decides what is remembered: a lane's new memory is kept only if its segment was complete (rule 3 of the memory
contract), or if documents are cut from their end (`data.cut`), where the first segment is the short one. State is an
input and an output, a NamedTuple; nothing is stored in the module. Shape letters: B lanes, T segment, D model, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist_mem.config import Config, ModelConfig
from dist_mem.memory import build_memory
from dist_mem.memory.base import LayerSpec, Memory, MemoryState, named_tensors, select_lanes
from dist_mem.nn import gpt2 as gpt2
from dist_mem.nn.flops import Flops, product
from dist_mem.nn.layers import DTYPES, Dropout, FeedForward, initialize
from dist_mem.nn.token_types import TokenTypes
from dist_mem.nn.vocabulary import Bin, Embedding, Softmax, adaptive_bins, plain_bin


class LMState(NamedTuple):
    blocks: tuple[MemoryState, ...]  # one state a block, defined by its memory
    stem: MemoryState  # of the rows before the segment, see `Stem`
    types: MemoryState = ()  # current token types, see `TokenTypes`; (): the model has no token types


class Features(NamedTuple):
    hidden: Tensor  # (B, T, D), input of the softmax
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane, summed over blocks
    state: LMState
    logs: dict[str, Tensor]  # name -> (B,) float32 values that memories log, the mean over the blocks that log them


class LMOutput(NamedTuple):
    nll: Tensor  # (B, T) float32, nats; 0 where the target is IGNORE
    hits: Tensor | None  # (B, T) bool, the target is the most probable token; None in training
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane, summed over blocks
    state: LMState  # committed: new for lanes whose segment is remembered, unchanged for the others
    logs: dict[str, Tensor]  # as in Features


def reset_lanes(state: LMState, fresh: LMState, is_new_document: Tensor) -> LMState:
    """Return the state with fresh memories in the lanes that start a document, (B,) bool."""
    return select_lanes(is_new_document, fresh, state)


def empty_memories(state: LMState, fresh: LMState) -> LMState:
    """Return fresh memories for all lanes; the token types stay, because they derive from the text."""
    return fresh._replace(types=state.types)


class BlockOutput(NamedTuple):
    y: Tensor  # (B, T, D), after the rows of a stem, if any
    state: MemoryState  # of the memory
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane
    logs: dict[str, Tensor]  # name -> (B,) float32, without gradient


class Block(nn.Module):
    """Memory layer (attention) and feed-forward, each with its residual and its layer norm.

    With pre-norm the memory normalises its input, because stored and new rows pass through the same norm.
    """

    def __init__(self, memory: Memory, feed_forward: FeedForward | gpt2.FeedForward, *, dropout: float = 0.0) -> None:
        """`dropout` applies to the memory's output, including a long-term memory's reading, after its own dropout."""
        super().__init__()
        spec = memory.spec
        self.pre_norm = spec.norm == "pre"
        self.memory = memory
        self.dropout = Dropout(dropout)
        self.attention_norm = nn.Identity() if self.pre_norm else nn.LayerNorm(spec.d_model)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(spec.d_model)

    def forward(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> BlockOutput:
        y, state, aux, _, _, logs = self.memory(x, state, valid_len)
        attended = self.attention_norm(x[:, -y.shape[1] :] + self.dropout(y))
        if self.pre_norm:
            out = attended + self.feed_forward(self.feed_forward_norm(attended))
        else:
            out = self.feed_forward_norm(attended + self.feed_forward(attended))
        values = {name: value.detach().float().expand(len(x)) for name, value in logs.items()}
        return BlockOutput(out, state, aux, values)

    def flops(self) -> Flops | None:
        """Count a complete segment of one lane; None if the memory does not count its operations."""
        memory, d_inner = self.memory, self.feed_forward.expand.out_features
        flops = memory.flops()
        return flops and flops + product(memory.num_rows, 2 * memory.spec.d_model, d_inner)


class MemoryLM(nn.Module):
    """A language model whose blocks carry memory from segment to segment."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        model = config.model
        bins = vocabulary_bins(model, vocab_size)
        self.activation_checkpointing = config.train.activation_checkpointing
        self.commits_short = config.data.cut == "end"
        self.embedding = make_embedding(model, bins)
        self.token_types = TokenTypes(model.token_types, vocab_size) if model.token_types else None
        self.blocks = nn.ModuleList(make_block(config, index) for index in range(model.num_layers))
        # Deviation: the published pre-norm model has no norm before the softmax; post-norm blocks end with one.
        self.final_norm = nn.LayerNorm(model.d_model) if model.norm == "pre" and model.final_norm else nn.Identity()
        is_gpt2 = model.kind == "gpt2"
        self.head = (gpt2.Softmax if is_gpt2 else Softmax)(bins, d_model=model.d_model)
        self.dropout = Dropout(model.dropout)
        self.last_dropout = nn.Identity() if is_gpt2 else self.dropout
        initialize(self, std=model.init_std)
        if is_gpt2:
            gpt2.scale_residual_weights(self, num_layers=model.num_layers)
        if model.tie_embeddings:
            self.head.tie(self.embedding)
        for memory in self.memories():
            memory.reset_parameters()
            memory.tie_parameters(self.memories()[0])
        self.stem = self.memories()[0].stem()

    def memories(self) -> list[Memory]:
        """Return the memory layer of every block."""
        return [cast(Block, block).memory for block in self.blocks]

    def auxiliary_parameter_names(self) -> list[str]:
        """Return the names of the trained parameters that learn from an auxiliary loss only."""
        auxiliary = {parameter for memory in self.memories() for parameter in memory.auxiliary_parameters()}
        return [name for name, parameter in self.named_parameters() if parameter in auxiliary]

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> LMState:
        """Return empty memories of lanes that begin these documents, (B,) int64; `dtype` is that of the activations."""
        blocks = tuple(memory.init_state(document_ids, device, dtype) for memory in self.memories())
        types = () if self.token_types is None else self.token_types.init_state(len(document_ids), device)
        return LMState(blocks, self.stem.init_state(document_ids, device, dtype), types)

    def features(self, tokens: Tensor, valid_len: Tensor, *, state: LMState) -> Features:
        """Compute everything but the softmax: tokens (B, T) int64, valid_len (B,) int64."""
        is_kept = valid_len > 0 if self.commits_short else valid_len == tokens.shape[1]
        embedded, types = self.embed(tokens, valid_len, state.types)
        x, stem_state = self.stem(self.dropout(embedded), state.stem)
        aux: dict[str, Tensor] = {}
        logs: dict[str, list[Tensor]] = {}
        committed = []
        for block, old in zip(self.blocks, state.blocks, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                output = checkpoint(block, x, old, valid_len, use_reentrant=False)
            else:
                output = block(x, old, valid_len)
            x = output.y
            committed.append(select_lanes(is_kept, output.state, old))
            for name, loss in output.aux.items():
                aux[name] = aux[name] + loss if name in aux else loss
            for name, value in output.logs.items():
                logs.setdefault(name, []).append(value)
        hidden = self.last_dropout(self.final_norm(x[:, -tokens.shape[1] :]))
        rest = select_lanes(is_kept, (stem_state, types), (state.stem, state.types))
        means = {name: torch.stack(values).mean(dim=0) for name, values in logs.items()}
        return Features(hidden, aux, LMState(tuple(committed), *rest), means)

    def embed(self, tokens: Tensor, valid_len: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Embed tokens, and add their types' embeddings if the model has types: (B, T, D), and the types' new state."""
        if self.token_types is None:
            return self.embedding(tokens), state
        types = self.token_types(tokens, valid_len, state)
        return self.embedding(tokens, types.ids), types.state

    def forward(self, tokens: Tensor, targets: Tensor, valid_len: Tensor, *, state: LMState) -> LMOutput:
        """Score one segment of every lane.

        Args:
            tokens: (B, T) int64, real tokens first.  targets: (B, T) int64, IGNORE where nothing is scored.
            valid_len: (B,) int64, real tokens; 0 for an idle lane. With `data.cut: end` less than T only where a
                document begins.  state: see `init_state` and `reset_lanes`.
        """
        hidden, aux, state, logs = self.features(tokens, valid_len, state=state)
        scores = self.head(hidden, targets)
        return LMOutput(scores.nll, scores.hits, aux, state, logs)

    def flops(self) -> Flops | None:
        """Count a complete segment of one lane, all memories full; None if a memory does not count its operations."""
        seg_len = self.memories()[0].spec.seg_len
        total = self.embedding.flops(seg_len) + self.head.flops(seg_len)
        for block in self.blocks:
            flops = cast(Block, block).flops()
            if flops is None:
                return None
            total += flops
        return total

    def log_probs(self, tokens: Tensor, valid_len: Tensor, *, state: LMState) -> tuple[Tensor, LMState]:
        """Return log-probabilities of every next token, (B, T, V) float32, and the committed state; for generation."""
        features = self.features(tokens, valid_len, state=state)
        return self.head.log_probs(features.hidden), features.state


def make_embedding(model: ModelConfig, bins: list[Bin]) -> Embedding:
    """Return the embedding layer; GPT-2's has learned positions."""
    if model.kind == "gpt2":
        return gpt2.Embedding(bins, d_model=model.d_model, num_positions=model.num_positions)
    return Embedding(bins, d_model=model.d_model)


def make_block(config: Config, layer_index: int) -> Block:
    """Return block `layer_index`, with its memory.

    GPT-2 applies dropout to the sum of attention and long-term memory, as published; other models apply it to each.
    """
    model = config.model
    spec = layer_spec(config, layer_index)
    sizes: dict[str, Any] = {"d_inner": model.d_inner, "dropout": model.dropout}
    if model.kind == "gpt2":
        memory = build_memory(config.memory, replace(spec, dropout=0.0))
        return Block(memory, gpt2.FeedForward(model.d_model, **sizes), dropout=model.dropout)
    return Block(build_memory(config.memory, spec), FeedForward(model.d_model, **sizes))


def layer_spec(config: Config, layer_index: int) -> LayerSpec:
    """Return the shapes and options of the memory of block `layer_index`."""
    model = config.model
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
        seg_len=config.train.seg_len,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        norm=model.norm,
        clamp_len=model.clamp_len,
        same_length=model.same_length,
        seed=config.train.seed,
        short_first=config.data.cut == "end",
    )


def vocabulary_bins(model: ModelConfig, vocab_size: int) -> list[Bin]:
    """Return the bins of `model.adaptive`, or one bin for a plain vocabulary."""
    d_embed = model.d_embed or model.d_model
    if model.adaptive is None:
        return plain_bin(vocab_size, d_model=model.d_model, d_embed=d_embed)
    adaptive = model.adaptive
    ties = None if adaptive.tie_projections is None else list(adaptive.tie_projections)
    return adaptive_bins(
        vocab_size,
        d_model=model.d_model,
        d_embed=d_embed,
        cutoffs=list(adaptive.cutoffs),
        div_val=adaptive.div_val,
        tie_projections=ties,
    )


def describe(config: Config, vocab_size: int) -> dict[str, int]:
    """Return sizes of a configuration, without allocating it: parameters, bytes of memory per lane, FLOPs per token.

    The FLOPs are those of `MemoryLM.flops`; they are left out if a memory does not count its operations.
    """
    dtype = DTYPES[config.train.precision]
    with torch.device("meta"):
        model = MemoryLM(config, vocab_size)
        state = model.init_state(torch.zeros(1, dtype=torch.int64), "meta", dtype)
    vocabulary = {id(parameter) for part in (model.embedding, model.head) for parameter in part.parameters()}
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    flops = model.flops()
    per_token = (
        {}
        if flops is None
        else {
            "scoring_flops_per_token": round(flops.scoring / config.train.seg_len),
            "training_flops_per_token": round(flops.training / config.train.seg_len),
        }
    )
    return per_token | {
        "num_parameters": sum(counts.values()),
        "num_vocabulary_parameters": sum(count for key, count in counts.items() if key in vocabulary),
        "num_layer_parameters": sum(count for key, count in counts.items() if key not in vocabulary),
        "state_bytes_per_lane": sum(part.numel() * part.element_size() for part in named_tensors(state).values()),
    }

"""MemoryLM: embed -> blocks, each with its memory -> softmax -> one negative log-likelihood per token.

The model decides what is remembered: a lane's new memory is kept only if its segment was complete (rule 3 of the memory
contract), or if documents are cut from their end (`data.cut`), where the first segment is the short one. State is an
input and an output, a NamedTuple; nothing is stored in the module. Shape letters: B lanes, T segment, D model, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.block import Block, ModelSpec, make_block
from dist_mem.config import ModelConfig
from dist_mem.config.memory_blocks import describe_memory, memory_of
from dist_mem.memory import convert_options
from dist_mem.memory.base import (
    Count,
    Memory,
    MemoryState,
    Opened,
    Places,
    Stem,
    can_step_rows,
    map_state,
    named_tensors,
    prefix_counts,
    select_lanes,
)
from dist_mem.nn.family import family_of
from dist_mem.nn.layers import DTYPES, Dropout, initialize
from dist_mem.nn.low_rank import LowRank
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import make_norm
from dist_mem.nn.placement import Placement
from dist_mem.nn.published_layers import GPT2Embedding, scale_residual_weights
from dist_mem.nn.token_types import TokenTypes
from dist_mem.nn.vocabulary import Bin, adaptive_bins, plain_bin
from dist_mem.runtime.gpu import convolutions_as_products


class LMState(NamedTuple):
    blocks: tuple[MemoryState, ...]  # one state per block, defined by its memory
    stem: MemoryState  # of the rows around the segment, see `Stem`
    types: MemoryState = ()  # current token types, see `TokenTypes`; (): the model has no token types


class Features(NamedTuple):
    hidden: Tensor  # (B, T, D), input of the softmax
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane, summed over blocks
    state: LMState
    logs: dict[str, Tensor]  # name -> (B,) float32 values that memories log, the mean over the blocks that log them


class LMOutput(NamedTuple):
    nll: Tensor  # (B, T) float32, nats; 0 where the target is IGNORE; (B, 0) without targets
    hits: Tensor | None  # (B, T) bool, the target is the most probable token; None in training
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane, summed over blocks
    state: LMState  # committed: new for lanes whose segment is remembered, unchanged for the others
    logs: dict[str, Tensor]  # as in Features


class OpenSegment(NamedTuple):
    """What is kept of the open segment of every lane, see `MemoryLM.step_rows`."""

    blocks: tuple[Opened, ...]
    types: MemoryState  # current token types, as in LMState


class DocumentStarts(NamedTuple):  # of documents, in the lanes of one segment
    fresh: LMState  # empty memories of all lanes
    is_new_document: Tensor  # (B,) bool


def reset_lanes(state: LMState, fresh: LMState, is_new_document: Tensor) -> LMState:
    """Return the state with fresh memories in the lanes that start a document, (B,) bool."""
    return select_lanes(is_new_document, fresh, state)


def empty_memories(state: LMState, fresh: LMState) -> LMState:
    """Return fresh memories for all lanes; the token types stay, because they derive from the text."""
    return replace(fresh, types=state.types)


class MemoryLM(nn.Module):
    """A language model whose blocks carry memory from segment to segment."""

    def __init__(self, spec: ModelSpec, placement: Placement | None = None) -> None:
        """`placement` says where the weights go; None: they stay on the CPU, in fp32."""
        super().__init__()
        model, place = spec.model, placement or Placement()
        family, bins = family_of(model), vocabulary_bins(model, spec.vocab_size)
        self.commits_short = spec.cut == "end"
        self.embedding = place.place_part(family.embedding(bins, model))
        self.token_types = TokenTypes(model.token_types, spec.vocab_size) if model.token_types else None
        self.blocks = nn.ModuleList(place.place_part(make_block(spec, index)) for index in range(model.num_layers))
        trained = spec.memory if spec.trained_memory is None else spec.trained_memory
        self._trained = [convert_options(memory_of(trained, index)[1]) for index in range(model.num_layers)]
        check_keys_are_read(model, spec.memory, self.memories())
        # Deviation: the published pre-norm model has no norm before the softmax; post-norm blocks end with one.
        rms_eps = model.norm_eps if family.has_rotary_attention else None
        has_norm = model.norm == "pre" and model.final_norm
        self.final_norm = make_norm(model.d_model, rms_eps=rms_eps) if has_norm else nn.Identity()
        self.kind = model.kind
        self.head = place.place_part(family.softmax(bins, d_model=model.d_model))
        self.dropout = Dropout(model.dropout)
        self.last_dropout = nn.Identity() if family.is_published else self.dropout
        for part in (self.embedding, *self.blocks, self.final_norm, self.head):
            with place.draw_weights(part):
                self._initialize(part, model)
        self.stem = place.place_part(self._common_stem())
        with place.draw_weights(self.stem):
            self._initialize(self.stem, model)
        self.first_place = self.stem.first_place if isinstance(self.embedding, GPT2Embedding) else 0
        if self.first_place and (num_rows := self.memories()[0].num_rows) > model.num_positions:
            seg_len, most = spec.train.seg_len, model.num_positions
            fewer = f"memory.num_tokens to at most {(most - seg_len) // 2}, or " if most - seg_len > 1 else ""
            raise ValueError(
                f"train.seg_len is {seg_len}, which is {num_rows} rows with those of the memory, more than "
                f"model.num_positions = {most}: set {fewer}train.seg_len to at most {most - (num_rows - seg_len)}"
            )

    def _initialize(self, part: nn.Module, model: ModelConfig) -> None:
        """Draw the weights of a part, and share those that it has in common with an earlier one."""
        initialize(part, std=model.init_std)
        if family_of(model).is_published:
            scale_residual_weights(part, num_layers=model.num_layers)
        for module in part.modules():
            if isinstance(module, LowRank):
                module.reset_parameters()
        if part is self.head and model.tie_embeddings:
            self.head.tie(self.embedding)
        if isinstance(part, Block):
            part.memory.reset_parameters()
            part.memory.tie_parameters(self._first_alike(part.memory))
        if isinstance(part, Stem):
            part.reset_parameters()

    def _first_alike(self, memory: Memory) -> Memory:
        """Return the memory of the first block that has the same one: all blocks have, unless `memory` is a map."""
        own = self._trained[memory.spec.layer_index]
        return next(other for other, trained in zip(self.memories(), self._trained, strict=True) if trained == own)

    def _common_stem(self) -> Stem:
        first = self.memories()[0]
        others = [memory for memory in self.memories() if self._first_alike(memory) is not first]
        for memory in (first, *others) if others else ():
            if type(memory.stem()) is not Stem:
                key, kind = f"memory.{memory.spec.layer_index}", type(memory).__name__
                fix = "give every block this memory, or this one another"
                raise ValueError(f"{key} is a {kind}, whose rows pass through all blocks with the segment: {fix}")
        return first.stem()

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

    def counts(self, state: LMState, num_segments: int) -> dict[str, Count]:
        """Return the counts in a state, as `Memory.counts`."""
        found = prefix_counts("stem", self.stem.counts(state.stem, num_segments))
        for number, (memory, part) in enumerate(zip(self.memories(), state.blocks, strict=True)):
            found |= prefix_counts(f"blocks.{number}", memory.counts(part, num_segments))
        if self.token_types is not None:
            last_type, last_token = len(self.token_types.ids) - 1, torch.iinfo(torch.int32).max
            found["types.current"] = Count(state.types.current, 0, last_type)
            found["types.newest"] = Count(state.types.newest, -1, last_token)
        return found

    @convolutions_as_products()
    def features(self, tokens: Tensor, valid_len: Tensor, *, state: LMState) -> Features:
        """Compute everything but the softmax: tokens (B, T) int64, valid_len (B,) int64."""
        is_kept = valid_len > 0 if self.commits_short else valid_len == tokens.shape[1]
        embedded, types = self.embed(tokens, valid_len, state.types)
        x, stem_state = self.stem(self.dropout(embedded), state.stem, *self.around(tokens))
        aux: dict[str, Tensor] = {}
        logs: dict[str, list[Tensor]] = {}
        committed = []
        for block, old in zip(self.blocks, state.blocks, strict=True):
            output = block(x, old, valid_len)
            x = output.y
            committed.append(select_lanes(is_kept, output.state, old))
            for name, loss in output.aux.items():
                aux[name] = aux[name] + loss if name in aux else loss
            for name, value in output.logs.items():
                logs.setdefault(name, []).append(value)
        top = self.last_dropout(self.final_norm(x))
        hidden, stem_state = self.stem.read_top(top, stem_state, seg_len=tokens.shape[1])
        rest = select_lanes(is_kept, (stem_state, types), (state.stem, state.types))
        means = {name: torch.stack(values).mean(dim=0) for name, values in logs.items()}
        return Features(hidden, aux, LMState(tuple(committed), *rest), means)

    def embed(
        self, tokens: Tensor, valid_len: Tensor, state: MemoryState, places: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Embed tokens, and add their types' embeddings if the model has types: (B, T, D), and the types' new state."""
        if self.first_place:
            row = torch.arange(tokens.shape[1], device=tokens.device) if places is None else places
            places = row + self.first_place
        if self.token_types is None:
            return self.embedding(tokens, places=places), state
        types = self.token_types(tokens, valid_len, state)
        return self.embedding(tokens, types.ids, places=places), types.state

    def around(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the learned positions of the stem's rows before and after a segment, (2 M, D), if they have any."""
        if not self.first_place:
            return ()
        before = torch.arange(self.first_place, device=tokens.device)
        return (self.embedding(None, places=torch.cat([before, before + self.first_place + tokens.shape[1]])),)

    @property
    def can_step(self) -> bool:
        """Whether every block reads a segment row by row."""
        return all(map(can_step_rows, self.memories()))

    @torch.no_grad()
    @convolutions_as_products()
    def open(self, state: LMState, first: Tensor) -> OpenSegment:
        """Return what is kept of a segment of which no row has been read, for `step_rows`.

        The rows of the stem before the segment are run through the blocks, by a forward of a segment that has the first
        token only.

        Args:
            first: (B,) int64, the segment's first token.
        """
        memories, valid_len = self.memories(), torch.ones_like(first)
        if type(self.stem) is Stem:
            no_rows = next(self.blocks.parameters()).new_empty(len(first), 0, memories[0].spec.d_model)
            parts = zip(memories, state.blocks, strict=True)
            return OpenSegment(tuple(memory.open_segment(part, no_rows) for memory, part in parts), state.types)
        tokens = F.pad(first[:, None], (0, max(memory.min_seg_len for memory in memories) - 1))
        embedded, _ = self.embed(tokens, valid_len, state.types)
        rows, _ = self.stem(embedded, state.stem, *self.around(tokens))
        num_before = rows.shape[1] - tokens.shape[1] - memories[0].num_after
        opened = list[Opened]()
        for block, part in zip(self.blocks, state.blocks, strict=True):
            opened.append(cast(Block, block).memory.open_segment(part, rows[:, :num_before]))
            rows = block(rows, part, valid_len).y
        return OpenSegment(tuple(opened), state.types)

    @convolutions_as_products()
    def step_rows(self, tokens: Tensor, opened: OpenSegment, places: Places) -> tuple[Tensor, OpenSegment]:
        """Return the input of the softmax for further tokens of open segments, (B, R) int64, as `features` does.

        It runs in evaluation mode, and may change `opened` in place.
        """
        x, types = self.embed(tokens, places.num_real, opened.types, places.row)
        blocks = list[Opened]()
        for block, part in zip(self.blocks, opened.blocks, strict=True):
            x, kept = cast(Block, block).step_rows(x, part, places)
            blocks.append(kept)
        return self.final_norm(x), OpenSegment(tuple(blocks), types)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        valid_len: Tensor,
        *,
        state: LMState,
        later: Sequence[DocumentStarts | None] = (),
    ) -> LMOutput:
        """Score one segment of every lane, or a window of n segments through which gradients flow (`Memory`).

        Args:
            tokens: (B, T) int64, real tokens first.  targets: (B, T) int64, IGNORE where nothing is scored; or (B, 0),
                and the head is not run.
            valid_len: (B,) int64, real tokens; 0 for an idle lane. With `data.cut: end` less than T only where a
                document begins.  state: see `init_state` and `reset_lanes`.
            later: of every later segment of a window, the lanes that begin a document in it, None if none does. Then
                tokens, targets and nll are (B, n T), valid_len and the values of logs (B, n).
        """
        if later:
            return self._read_window(tokens, targets, valid_len, state, later)
        hidden, aux, state, logs = self.features(tokens, valid_len, state=state)
        if not targets.shape[1]:
            return LMOutput(hidden.new_empty(targets.shape, dtype=torch.float32), None, aux, state, logs)
        scores = self.head(hidden, targets)
        return LMOutput(scores.nll, scores.hits, aux, state, logs)

    def _read_window(
        self, tokens: Tensor, targets: Tensor, valid_len: Tensor, state: LMState, later: Sequence[DocumentStarts | None]
    ) -> LMOutput:
        outputs = list[LMOutput]()
        for start, segment in zip((None, *later), split_segments(tokens, targets, valid_len), strict=True):
            state = state if start is None else reset_lanes(state, *start)
            outputs.append(self.forward(*segment, state=state))
            state = outputs[-1].state
        return join_segments(outputs)

    def with_gradient(self, state: LMState) -> LMState:
        """Return the state as the begin of a graph, with a gradient where the memory carries one."""

        def begin(part: Tensor) -> Tensor:
            return part.detach().requires_grad_() if part.is_floating_point() else part

        parts = zip(self.memories(), state.blocks, strict=True)
        blocks = tuple(map_state(begin, part) if memory.carries_gradient else part for memory, part in parts)
        return replace(state, blocks=blocks, stem=map_state(begin, state.stem))

    def log_probs(self, tokens: Tensor, valid_len: Tensor, *, state: LMState) -> tuple[Tensor, LMState]:
        """Return log-probabilities of every next token, (B, T, V) float32, and the committed state; for generation."""
        features = self.features(tokens, valid_len, state=state)
        return self.head.log_probs(features.hidden), features.state


def split_segments(tokens: Tensor, targets: Tensor, valid_len: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens (B, T), targets (B, T) and valid_len (B,) of the segments of a window, see `MemoryLM.forward`."""
    num = valid_len.shape[1]
    lengths = valid_len.t().contiguous()  # compiled blocks would be compiled again for another stride
    return zip(tokens.chunk(num, 1), targets.chunk(num, 1), lengths, strict=True)


def join_segments(outputs: Sequence[LMOutput]) -> LMOutput:
    """Return the output of a window from those of its segments, see `MemoryLM.forward`."""
    aux = {name: torch.stack([output.aux[name] for output in outputs]).sum(0) for name in outputs[0].aux}
    logs = {name: torch.stack([output.logs[name] for output in outputs], 1) for name in outputs[0].logs}
    return LMOutput(torch.cat([output.nll for output in outputs], 1), None, aux, outputs[-1].state, logs)


def check_keys_are_read(model: ModelConfig, memory: Mapping[str, Any], memories: Sequence[Memory]) -> None:
    """Raise ValueError for a key of `model` that is set and that no memory reads: reports would record it in vain."""
    settings = {name: getattr(model, name) for name in ("clamp_len", "sliding_window")}
    settings["same_length"] = "true" if model.same_length else None
    for name, value in settings.items():
        if value is not None and not any(name in each.model_keys for each in memories):
            kind = f"memory.kind {describe_memory(memory)} does not read it"
            has_place = any(getattr(each.options, "over", "") is None for each in memories)
            other = "memory.over.kind=none" if has_place else "another memory.kind"
            raise ValueError(f"model.{name} is {value}, but {kind}: leave model.{name} out, or set {other}")


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


def describe(spec: ModelSpec) -> dict[str, int]:
    """Return sizes of a model, without allocating it: parameters, and bytes of memory per lane in training."""
    dtype = DTYPES[spec.train.precision]
    with torch.device("meta"):
        model = MemoryLM(spec)
        state = model.init_state(torch.zeros(1, dtype=torch.int64), "meta", dtype)
    vocabulary = {id(parameter) for part in (model.embedding, model.head) for parameter in part.parameters()}
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    return {
        "num_parameters": sum(counts.values()),
        "num_vocabulary_parameters": sum(count for key, count in counts.items() if key in vocabulary),
        "num_layer_parameters": sum(count for key, count in counts.items() if key not in vocabulary),
        "state_bytes_per_lane": sum(part.numel() * part.element_size() for part in named_tensors(state).values()),
    }

"""The memory contract: a block's attention sub-layer is its memory layer.

A memory is an `nn.Module` built from a `LayerSpec` and its `Options`. Its state is a NamedTuple of tensors, lane first,
that `forward` takes and returns; `forward` modifies none of its inputs. The model (dist_mem/model.py), not the memory,
decides whether a new state is kept (rule 3), and a lane that starts a new document starts empty.

Rules, each tested on every memory by discovery (tests/memory/test_memory_contract.py):
1. pure  2. same structure, shapes, dtypes; no gradient beyond the update, and within it only through the states of
memories that say so (`carries_gradient`)  3. only complete segments are committed, and with `data.cut: end` a
document's first, which may be short; what leaves a memory has left `kept_len`
4. causal; rows read one after another (`can_step`) are those of the whole segment
5. lanes are independent; a reset lane equals a fresh one  6. document ends are masks, never branches
7. parameters are used only in the forward of a module that registers them  8. randomness is a counter hash
9. parity with the published reference vectors where they exist
10. `inspect` and `forget` of an `Inspectable` memory tell and take out what is read, and change nothing else
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from dist_mem.memory.parts.inspection import Inspection
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.stepping import Opened as Opened
from dist_mem.nn.stepping import Places as Places
from dist_mem.nn.stepping import StepOutput as StepOutput

MemoryState: TypeAlias = Any  # a NamedTuple of tensors, lane first, or of such NamedTuples; each memory has its own
StateT = TypeVar("StateT")
NO_LOGS: Mapping[str, Tensor] = {}  # no MappingProxyType: torch.compile refuses it beside a dict that a memory fills


class Evicted(NamedTuple):
    """The rows that a memory evicts in this step, for a memory built over it."""

    rows: Tensor  # (B, E, D), E = `Memory.evicted_len`; rows of the block's input, oldest first, without gradient
    valid: Tensor  # (B,) bool, whether the lane evicts E rows; if not, it evicts none


def evict_all(rows: Tensor, valid_len: Tensor) -> Evicted:
    """Return that every lane evicts these rows, (B, E, D); valid_len (B,)."""
    return Evicted(rows.detach(), torch.ones_like(valid_len, dtype=torch.bool))


class MemoryOutput(NamedTuple):
    y: Tensor  # (B, num_rows, D) attention sub-layer output of the last rows of x, before the residual
    state: MemoryState  # the same NamedTuple type as the input state; without gradient unless `carries_gradient`
    aux: dict[str, Tensor]  # name -> (B,) weighted auxiliary loss per lane, averaged over real queries
    query: Tensor  # (H, B, T, K) content queries of the segment, before biases; a memory over this one reads with them
    evicted: Evicted  # as if every segment were complete: for other segments the model discards the new state anyway
    logs: Mapping[str, Tensor] = NO_LOGS  # name -> () or (B,) values logged as memory/NAME, without gradient


class Count(NamedTuple):
    """A count in a state, and the values that a reading of so many segments leaves: one, or all in a range."""

    value: Tensor  # (B,) or (B, N) int64
    least: int
    most: int


class Memory(nn.Module):
    """Base class of all memory layers.

    `forward(x, state, valid_len)` takes x (B, T, D), the raw block input with real tokens first, and valid_len (B,)
    int64, how many of the T tokens are real. If the memory has a stem, x has its rows too: those before the segment
    first, and the `num_after` rows after it last, so that padding may lie between these and the real tokens. With
    `spec.norm == "pre"` the memory applies its layer norm to stored and new rows alike, so it stores raw rows. It
    returns the attention output before residual and post-norm, which belong to the block. A memory over this one finds
    the layer norm as `norm`.
    """

    @dataclass
    class Options:
        """The configuration keys of a memory besides `kind`."""

    # The name in its paper, for tables and pictures; "": its kind. Where options change it, override `title_of`.
    title: ClassVar[str] = ""
    # Whether gradients flow through the state to the earlier segments of a window (`train.bptt_segments`).
    carries_gradient: bool = False
    # Whether the first segment of a document may be committed with less than T tokens (`spec.short_first`). Such a
    # memory keeps the first `valid_len` rows of that segment and none of the padding.
    takes_short_first: bool = False
    # Whether products of float32 must be exact here, so that `train.tf32` is refused: those of a regression.
    needs_exact_products: bool = False
    # Whether the rows that it evicts are of equal parts of a segment, in their order; if not, of any of its tokens.
    evicts_parts: bool = True
    # Of a memory with the option `over`, whether it reads the rows that leave the memory there.
    reads_evicted: bool = True
    # The dimension of its states along which rows stand: the last is a row, the others are lanes and heads.
    rows_dim: ClassVar[int] = -2
    # Whether `mem_len` counts a long-term store: `eval.mem_len` leaves it where another block has a short-term memory.
    is_store: ClassVar[bool] = False
    # Number of rows of the stem after the segment, which are the last rows of x and of the output.
    num_after: int = 0

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__()
        self.spec = spec
        self.options = options

    @property
    def evicted_len(self) -> int:
        """Number of rows E that this memory evicts at once: tokens or compressed rows."""
        return self.spec.seg_len

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens that an evicted row is made from, if `evicts_parts`."""
        return self.spec.seg_len // self.evicted_len

    @property
    def kept_len(self) -> int:
        """Number of tokens, the newest, whose rows a full memory holds; what it evicts is older."""
        return 0

    @property
    def min_seg_len(self) -> int:
        """Fewest rows of x for which an incomplete segment has the outputs that T rows give; T unless overridden.

        Generation computes an open segment with these rows instead of T. Its new state is discarded.
        """
        return self.spec.seg_len

    @property
    def can_step(self) -> bool:
        """Whether `open_segment` and `step_rows` read a segment row by row, with these options; see `can_step_rows`."""
        return False

    def back_end(self, device_type: str, dtype: torch.dtype) -> BackEndChoice | None:
        """Return what computes it for activations of this dtype on a device, and why; None: it has no choice.

        Raises:
            ValueError: the configuration asks for what cannot compute there.
        """
        return None

    @property
    def model_keys(self) -> Collection[str]:
        """Keys of `model` that this memory reads, of clamp_len, same_length and a Llama's sliding_window.

        One that is set and that no memory reads is refused.
        """
        return "clamp_len", "same_length"

    @property
    def num_rows(self) -> int:
        """Number of rows that this memory outputs: the segment, and the rows of the stem that it refreshes."""
        return self.spec.seg_len

    def stem(self) -> Stem:
        """Return the stem, which puts rows around the first block's input; the model uses the first block's stem.

        By default it puts none.
        """
        return Stem()

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> MemoryState:
        """Return an empty memory for each lane; `document_ids` (B,) int64 seed random draws (rule 8)."""
        raise NotImplementedError

    def counts(self, state: MemoryState, num_segments: int) -> dict[str, Count]:
        """Return the counts in a state by their names in `named_tensors`, after so many whole segments of a document.

        A file with this state may be of another writer, so the right values follow from the number alone.
        """
        return {}

    def forward(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> MemoryOutput:
        """Attend, and return the new state; see the class."""
        raise NotImplementedError

    def after_block(self, rows: Tensor, state: MemoryState) -> MemoryState:
        """Return the state that `forward` returned, with what the block has made of the rows, its output (B, R, D).

        By default nothing of it is remembered. Parameters are those of modules that this calls (rule 7).
        """
        return state

    @property
    def keeps_outputs(self) -> bool:
        """Whether `after_block` does something. One that only passes the rows on answers as the memory below."""
        return type(self).after_block is not Memory.after_block

    def open_segment(self, state: MemoryState, rows: Tensor) -> Opened:
        """Return what `step_rows` needs at the beginning of a segment; optional, see `can_step`.

        Args:
            rows: (B, P, D), the rows of the stem before the segment, as input of this block; without a stem P is 0.
                They may depend on the segment's first token, but on no other.
        """
        raise NotImplementedError

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        """Return what `forward` returns for further rows of the segment, x (B, R, D), without dropout.

        Args:
            opened: as `open_segment` or the last step returned it; it may be changed in place.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Adjust initial weights after the model has drawn those of the block by one rule; by default none changes.

        The model calls it once, after `initialize`; PyTorch calls it only on a meta-device module wrapped in FSDP.
        """

    def tie_parameters(self, first: Any) -> None:
        """Use parameters of the first block's memory, as u and v of relative attention; by default none is shared.

        Share the parameters, and do not read their values: at ZeRO stage 3 these are divided among the ranks already.
        """

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that learn from an auxiliary loss only; their gradient norm is logged separately."""
        return []

    @classmethod
    def title_of(cls, options: Any) -> str:
        """Return the title of this memory with these options."""
        return cls.title

    @classmethod
    def fix_lengths(cls, options: Any, seg_len: int) -> Any:
        """Return options in which every null that stands for `train.seg_len` is that length.

        An evaluation with other segments (`eval.seg_len`) then has the memory as trained.
        """
        return options

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        """Return options for the rules of `check-memory`: it fits segments of `seg_len` tokens and fills within two."""
        return {}


class Inspectable(Memory):
    """A memory that says what it reads, and can be asked to forget a passage (rule 10); both are optional."""

    no_forget: ClassVar[str] = "it does not implement `forget`"  # why not, where that is so by its nature

    @torch.no_grad()
    def inspect(self, x: Tensor, state: MemoryState, valid_len: Tensor, trace: Any = None) -> Inspection:
        """Return what `forward` reads with these arguments, and from which tokens; see `Inspection`.

        It changes nothing, and a forward that nobody inspects does nothing for it. By default nothing is returned.

        Args:
            trace: of the last call for the same lanes; None if they begin their documents.
        """
        return Inspection()

    def forget(self, state: MemoryState, begin: Tensor, end: Tensor, trace: Any = None) -> MemoryState:
        """Return the state without what it holds of the tokens in [begin, end), for a counterfactual.

        The rows are taken out, not replaced: other rows, and their distances, stay. A lane with an empty range keeps
        its outputs bit for bit. The state may have more tensors than before, so it is for reading on, not for a
        checkpoint.

        Args:
            begin, end: (B,) int64, counted from the next segment's first token: -1 is the newest in the memory.
            trace: of the last `inspect` call; a memory that moves what it holds needs it.

        Raises:
            NotImplementedError: the memory does not implement it, and carries something; see `no_forget`.
        """
        if carries_nothing(self, state):
            return state
        raise NotImplementedError(f"{type(self).__name__} cannot forget a passage: {self.no_forget}")


class OverMemory(Inspectable):
    """A memory that may be built over another one, `over`, to which it passes on what concerns parameters."""

    over: Any  # the memory below; None: there is none

    def __init__(self, spec: LayerSpec, options: Any, over: Memory | None = None) -> None:
        super().__init__(spec, options)
        self.over = over

    @property
    def model_keys(self) -> Collection[str]:
        return () if self.over is None else self.over.model_keys

    def reset_parameters(self) -> None:
        if self.over is not None:
            self.over.reset_parameters()

    def tie_parameters(self, first: Any) -> None:
        if self.over is not None:
            self.over.tie_parameters(first.over)

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        return [] if self.over is None else self.over.auxiliary_parameters()


def describe_back_ends(model: nn.Module, device_type: str, dtype: torch.dtype) -> list[str]:
    """Return one line for each back end that memories of the model use, and why; see `Memory.back_end`."""
    memories = [memory for memory in model.modules() if isinstance(memory, Memory)]
    used = dict.fromkeys((memory.back_end(device_type, dtype), memory.spec.layer_index) for memory in memories)
    choices, total = Counter(choice for choice, _ in used if choice), len({layer for _, layer in used})
    return [f"memory of {count} of {total} layers: {one.back_end} ({one.reason})" for one, count in choices.items()]


def can_step_rows(memory: Memory) -> bool:
    """Return whether a memory reads a segment row by row: `can_step`, if its own class defines it.

    A subclass that only inherits it may have another `forward`.
    """
    return "can_step" in vars(type(memory)) and memory.can_step


def carries_nothing(memory: Memory, state: MemoryState) -> bool:
    """Return whether a memory has no tensors from segment to segment and no rows around them."""
    return not named_tensors(state) and type(memory).stem is Memory.stem


class Stem(nn.Module):
    """Puts memory rows before the segment and after it, which pass through all blocks; this base class puts none."""

    # Of the segment's first token. Where it is not 0, rows before and after the segment have places too, and in a GPT-2
    # `forward` gets their learned positions as a third argument, (2 M, D).
    first_place = 0

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> MemoryState:
        """Return an empty state for each lane, as `Memory.init_state`."""
        return ()

    def counts(self, state: MemoryState, num_segments: int) -> dict[str, Count]:
        """Return the counts in a state, as `Memory.counts`."""
        return {}

    def reset_parameters(self) -> None:
        """Adjust initial weights, as `Memory.reset_parameters`."""

    def forward(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Return memory rows, the embedded segment x (B, T, D) and memory rows, (B, R, D); and the new state."""
        return x, state

    def read_top(self, rows: Tensor, state: MemoryState, *, seg_len: int) -> tuple[Tensor, MemoryState]:
        """Return the segment's rows at the top, (B, T, D), and the new state, which may hold what the others became.

        It is no forward, so it uses no parameters (rule 7).

        Args:
            rows: (B, R, D) what the last block returns, after the final norm.
            state: the new state that `forward` returned.
            seg_len: T of this forward, which generation makes shorter than `train.seg_len`.
        """
        return rows[:, -seg_len:], state


@contextmanager
def keys_begin_with(key: str) -> Iterator[None]:
    """Correct keys in errors: a memory does not know where in the configuration it stands."""
    try:
        yield
    except ValueError as error:  # memory.py is a file, and dist_mem.memory a module
        raise ValueError(re.sub(r"(?<![./\w])memory\.(?!py\b)(?=\w)", f"{key}.", str(error))) from None


def whole_segments(mem_len: int, *, seg_len: int) -> int:
    """Return `Memory.evicted_len` of a FIFO of M rows, which is T.

    Raises:
        ValueError: M is not a multiple of T, so the FIFO would sometimes evict less than a segment.
    """
    if mem_len % seg_len:
        raise ValueError(
            f"memory.mem_len is {mem_len}, but must be a multiple of train.seg_len = {seg_len}: only whole segments "
            "pass on to a memory over this one"
        )
    return seg_len


def map_state(function: Callable[..., Tensor], *states: MemoryState) -> MemoryState:
    """Apply `function` to corresponding tensors of equally structured states (NamedTuples and tuples of them)."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    mapped = [map_state(function, *parts) for parts in zip(*states, strict=True)]
    return type(first)(*mapped) if hasattr(first, "_fields") else tuple(mapped)


def take_lanes(state: StateT, lanes: Sequence[int]) -> StateT:
    """Return some lanes of a state, in this order; a lane may come twice."""
    index = _index_of(lanes)
    return map_state(lambda part: part[index(part.device)], state)


def put_lanes(state: StateT, lanes: Sequence[int], new: StateT) -> StateT:
    """Return the state with those of `new` in these lanes."""
    index = _index_of(lanes)
    return map_state(lambda old, rows: old.index_copy(0, index(old.device), rows), state, new)


def _index_of(lanes: Sequence[int]) -> Callable[[torch.device], Tensor]:
    """Return the lanes on a device, copied to it once."""
    return cache(lambda device: torch.tensor(lanes, dtype=torch.int64, device=device))


def select_lanes(keep_new: Tensor, new: StateT, old: StateT) -> StateT:
    """Return, per lane, the new state where `keep_new` (B,) bool is true, else the old one."""

    def choose(new_part: Tensor, old_part: Tensor) -> Tensor:
        mask = keep_new.view(-1, *[1] * (new_part.dim() - 1))
        return torch.where(mask, new_part, old_part)

    return map_state(choose, new, old)


def detach_state(state: StateT) -> StateT:
    """Return the state without gradient: the border of a window of `train.bptt_segments` segments."""
    cut: StateT = map_state(Tensor.detach, state)
    return cut


def exactly(value: Tensor, number: int, *, most: int | None = None) -> Count:
    """Return a count that is `number`, or `most` where that is less."""
    number = number if most is None else min(number, most)
    return Count(value, number, number)


def prefix_counts(name: str, counts: Mapping[str, Count]) -> dict[str, Count]:
    """Return the counts of a part of a state as those of the whole."""
    return {f"{name}.{each}": count for each, count in counts.items()}


def named_tensors(state: MemoryState, prefix: str = "") -> dict[str, Tensor]:
    """Return a state's tensors by flat name: field names of NamedTuples and indices of tuples, joined by dots."""
    if isinstance(state, Tensor):
        return {prefix: state}
    names: Sequence[str] = getattr(state, "_fields", [str(index) for index in range(len(state))])
    result: dict[str, Tensor] = {}
    for name, part in zip(names, state, strict=True):
        result.update(named_tensors(part, f"{prefix}.{name}" if prefix else name))
    return result

"""Count what one micro-batch allocates, computes and moves, by running the model's own code on meta tensors.

No formula has to follow the code: attention, checkpointing and memories from outside the package are counted alike.
The blocks of a built-in memory are the same but for the last, so short models are run and extrapolated; the tests
compare that with whole models. Shape letters: B lanes of a micro-batch, T segment.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_mem.block import ModelSpec
from dist_mem.config import ModelConfig
from dist_mem.config.memory_blocks import kinds_of
from dist_mem.data.batch_plan import backwards_of_window
from dist_mem.engine import window
from dist_mem.engine.optimizer import freeze
from dist_mem.errors import UnusableError
from dist_mem.estimate.operations import other_flops, product_flops
from dist_mem.memory import memory_kinds
from dist_mem.model import MemoryLM
from dist_mem.nn.kernel_shapes import KERNELS, LAUNCHED, compute_one_kernel, plan_for
from dist_mem.nn.layers import DTYPES, Dropout

_aten = torch.ops.aten
# Operations that return views, or memory that the caller fills: they move nothing.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
_FREE |= {"_unsafe_view"}  # a view of its input, which nothing else refers to

_PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}


class NotCountedError(UnusableError):
    """A memory from outside the package does not run on meta tensors, so nothing can be counted."""


class Flops(NamedTuple):
    """Operations of a predicted token, a multiplication and an addition being two.

    Those of matrix products and of torch's convolutions, where nothing else is said. Budgets of studies, MFU and
    predicted times use these: a budget sets the number of updates, which kept results must not lose.
    """

    scoring: int  # a forward
    training: int  # a forward and a backward, without the recomputation of activation checkpointing


class Operations(NamedTuple):
    """What a predicted token costs in two counts; see operations.py."""

    products: Flops
    all: Flops  # products and every other multiplication and addition: systems, short convolutions, norms, softmax


class Work(NamedTuple):
    """One kernel: the operations and bytes that bound its time."""

    flops: int  # of matrix products; 0 for all else
    num_bytes: int  # read and written
    dtype: str = ""  # of what a product multiplies: bf16, fp16 or fp32
    operator: str = ""  # the name in `kernel_shapes.KERNELS` of a fused kernel, without `_backward`


class MicroBatchCost(NamedTuple):
    """One micro-batch on one rank, beyond weights, gradients and the memories before it."""

    peak: int  # most bytes allocated at one time
    kept: int  # bytes at the end of the forward: what the backward needs, and the new memories
    kernels: list[tuple[float, Work]]  # how often -> one kernel


class LiveBytes:
    """The bytes of the storages that were added and still exist, now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, once, until it is freed."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Allocations(TorchDispatchMode):
    """Follows the bytes of all tensors that are created under it, and the work of every operation."""

    def __init__(self, token_shares: Iterable[float] = ()) -> None:
        """`token_shares`: of each later bin of an adaptive vocabulary, the share of tokens that it holds."""
        super().__init__()
        self.live = LiveBytes()
        self.kernels: list[Work] = []
        self._shares = list(token_shares)
        self._num_chosen = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is _aten.nonzero.default and args[0].is_meta:
            output = self._chosen_rows(args[0])
        else:
            output = function(*args, **(kwargs or {}))
        if function.is_view:
            return output
        read, written = _tensors((args, kwargs)), _tensors(output)
        given = {tensor.untyped_storage()._cdata for tensor in read}  # changed in place, perhaps older than this count
        for tensor in written:
            if tensor.untyped_storage()._cdata not in given:
                self.live.add(tensor.untyped_storage())
        name = function.overloadpacket.__name__
        if name in LAUNCHED:
            launched = LAUNCHED[name](*args)
            self.live.peak = max(self.live.peak, self.live.now + launched.workspace)
            self.kernels += [Work(0, num_bytes) for num_bytes in launched.num_bytes]
        elif name not in _FREE and (read or written):
            flops, num_bytes = product_flops(name, args, output), _bytes_moved(read, written)
            self.kernels.append(Work(flops, num_bytes, *(_product(name, args) if flops else ())))
        return output

    def _chosen_rows(self, mask: Tensor) -> Tensor:
        """Return as many rows as are expected: only values could tell which targets an adaptive bin holds."""
        share = self._shares[self._num_chosen % len(self._shares)]
        self._num_chosen += 1
        return mask.new_empty((math.ceil(share * mask.numel()), mask.dim()), dtype=torch.int64)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_moved(read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    """Return the bytes of one operation; what a broadcast repeats is read once."""
    inputs = sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in read)
    return inputs + sum(tensor.numel() * tensor.element_size() for tensor in written)


def _product(name: str, args: tuple[Any, ...]) -> tuple[str, str]:
    """Return `Work.dtype` and `Work.operator`; float64, in which no training computes, counts as fp32."""
    if name in KERNELS:  # other arguments may be wider than the query
        return _PRECISIONS.get(args[KERNELS[name].query].dtype, "fp32"), name.removesuffix("_backward")
    return _PRECISIONS.get(_tensors(args)[0].dtype, "fp32"), ""


def expected_shares(model: ModelConfig, vocab_size: int) -> list[float]:
    """Return the share of tokens in each later bin of an adaptive vocabulary, by Zipf's law: 1 / rank."""
    if model.adaptive is None:
        return []
    edges = [*model.adaptive.cutoffs, vocab_size]
    return [math.log(end / begin) / math.log(vocab_size) for begin, end in pairwise(edges)]


def count_micro_batch(
    spec: ModelSpec, *, on_gpu: bool = True, keeps_gradients: bool = False, forward_in: str | None = None
) -> MicroBatchCost:
    """Count forward and backward of `train.micro_batch_size` lanes over a window of `train.bptt_segments`.

    Args:
        on_gpu: the operations are those of a GPU.
        keeps_gradients: gradients are included, from none at the begin to all at the end.
        forward_in: the precision of a forward alone; None: forward and backward, in `train.precision`.
    """
    eager = spec._replace(train=replace(spec.train, compile=False))  # meta tensors cannot be compiled
    parts = [
        (times, _count(short, on_gpu=on_gpu, keeps_gradients=keeps_gradients, forward_in=forward_in))
        for times, short in _short_models(eager, 2)
    ]
    kernels = [(float(times), work) for times, counted in parts for _, work in counted.kernels]
    peak, kept = (sum(times * getattr(counted, name) for times, counted in parts) for name in ("peak", "kept"))
    return MicroBatchCost(peak, kept, kernels)


def flops_per_token(spec: ModelSpec, *, num_lanes: int | None = None) -> Flops:
    """Count the FLOPs of a token in matrix products and torch's convolutions; as `operations_per_token`."""
    return operations_per_token(spec, num_lanes=num_lanes).products


def operations_per_token(spec: ModelSpec, *, num_lanes: int | None = None) -> Operations:
    """Count the operations of a token in one complete segment of every lane, with full memories.

    They are those of torch's operators, also where a device has kernels of its own. The segment begins with a constant
    state: a backward through carried states (`train.bptt_segments`) is not counted, up to 8 % of a training in
    docs/log/2026-12-02-flops-through-carried-states-are-not-counted.md. To count it would change the number of updates
    that budgets give, and so the cells that are kept. No target is in a later bin of an adaptive vocabulary: their
    number depends on the data. The optimizer's are not among them.

    Args:
        num_lanes: of a forward pass, which share some operations; None: `train.micro_batch_size`.

    Raises:
        NotCountedError: the memory does not run on meta tensors.
    """
    # Other back ends compute scores twice, or those of invisible keys not at all.
    train = replace(spec.train, activation_checkpointing="none", compile=False)
    simple = spec._replace(model=replace(spec.model, attention="simple"), train=train)
    shape = (num_lanes or train.micro_batch_size, train.seg_len)
    counts = [(times, _operations(short, shape)) for times, short in _short_models(simple, 1)]

    def per_token(place: int) -> Flops:
        totals = (sum(times * found[place][of] for times, found in counts) for of in (0, 1))
        return Flops(*(round(total / math.prod(shape)) for total in totals))

    return Operations(per_token(0), per_token(1))


def _short_models(spec: ModelSpec, num_layers: int) -> list[tuple[int, ModelSpec]]:
    """Return models, and how often each counts so that they make up the whole one: `num_layers` blocks and one more.

    A model whose blocks may differ is returned whole.
    """

    def of(number: int) -> ModelSpec:
        return spec._replace(model=replace(spec.model, num_layers=number))

    train, more = spec.train, spec.model.num_layers - num_layers
    is_uniform = train.activation_checkpointing in ("none", "segments") or train.activation_checkpointing_share == 1.0
    if more <= 1 or spec.memory["kind"] not in memory_kinds() or not is_uniform or not _freezes_alike(spec):
        return [(1, spec)]
    return [(1 - more, of(num_layers)), (more, of(num_layers + 1))]


class FlopCounter(TorchDispatchMode):
    """Sums the FLOPs of all operators under it."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.others = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = function.overloadpacket.__name__, kwargs or {}
        if name == "one_kernel":
            with self:  # what it is made of
                return compute_one_kernel(*args)
        output = function(*args, **given)
        flops = product_flops(name, args, output)
        self.products += flops
        self.others += 0 if flops else other_flops(name, args, given, output)
        return output


def _freezes_alike(spec: ModelSpec) -> bool:
    """Return whether the same weights are frozen in every block."""
    if not spec.groups:
        return True
    with torch.device("meta"), _runs_on_meta(spec.memory):
        blocks = _build(spec).blocks
    trained = {frozenset(name for name, part in block.named_parameters() if part.requires_grad) for block in blocks}
    return len(trained) == 1


def _build(spec: ModelSpec) -> MemoryLM:
    """Build the model with the weights frozen that the optimizer leaves as they are."""
    model = MemoryLM(spec)
    freeze(model, spec.groups)
    return model


def _operations(spec: ModelSpec, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the FLOPs of products and of all, each of a forward, and of a forward and a backward, of tokens (B, T)."""
    with torch.device("meta"), _runs_on_meta(spec.memory):
        model = _build(spec)
        tokens, lane_ids = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64)
        _set_rows_by_bin(model, [0.0] * len(model.head.spans[1:]))
        state = model.init_state(lane_ids, "meta", torch.float32)
        with torch.no_grad(), FlopCounter() as scoring:
            model(tokens, tokens, lane_ids, state=state)
        with FlopCounter() as training:
            output = model(tokens, tokens, lane_ids, state=state)
            torch.stack([part.sum() for part in (output.nll, *output.aux.values())]).sum().backward()
    products = scoring.products, training.products
    return products, (products[0] + scoring.others, products[1] + training.others)


@contextmanager
def _runs_on_meta(memory: Mapping[str, Any]) -> Iterator[None]:
    """Name the memory from outside the package if one does not run on meta tensors."""
    outside = [kind for _, kind in kinds_of(memory) if kind not in memory_kinds()]
    try:
        yield
    except RuntimeError as error:
        if not outside:
            raise
        reason, kinds = str(error).partition("\n")[0], ", ".join(outside)
        raise NotCountedError(
            f"memory.kind is {kinds}, whose operations cannot be counted, because it does not run on meta tensors: "
            f"{reason}"
        ) from error


def mix_costs(written: MicroBatchCost, recomputed: MicroBatchCost, share: float) -> MicroBatchCost:
    """Return the count of a model that recomputes a share of its blocks, from those of none and all.

    The peak is a bound: when the first blocks are computed again, the backward has freed what the last ones kept.
    """
    kept = round((1.0 - share) * written.kept + share * recomputed.kept)
    peak = max(kept + written.peak - written.kept, recomputed.peak)
    parts = ((1.0 - share, written), (share, recomputed))
    return MicroBatchCost(peak, kept, [(part * number, work) for part, of in parts for number, work in of.kernels])


def _line(first: int, second: int, steps: int) -> int:
    """Return the value `steps` after the first of two successive values of a line."""
    return first + steps * (second - first)


def _work_on_line(first: Work, second: Work, steps: int) -> Work:
    flops, num_bytes = _line(first.flops, second.flops, steps), _line(first.num_bytes, second.num_bytes, steps)
    return first._replace(flops=flops, num_bytes=num_bytes)


class Counts:
    """Counts of one model by `train.micro_batch_size`; from four on, on the line of two and three lanes."""

    def __init__(self, spec: ModelSpec, *, on_gpu: bool) -> None:
        self._count = lambda lanes: count_micro_batch(with_micro_lanes(spec, lanes), on_gpu=on_gpu)
        self._two, self._three = self._count(2), self._count(3)

    def at(self, lanes: int) -> MicroBatchCost:
        """Return the count of so many lanes; one alone, or a model that works in chunks, takes other kernels."""
        if lanes == 1 or len(self._two.kernels) != len(self._three.kernels):
            return self._count(lanes)
        more = lanes - 2
        kernels = [
            (number, _work_on_line(two, three, more))
            for (number, two), (_, three) in zip(self._two.kernels, self._three.kernels, strict=True)
        ]
        peak, kept = _line(self._two.peak, self._three.peak, more), _line(self._two.kept, self._three.kept, more)
        return MicroBatchCost(peak, kept, kernels)


def with_micro_lanes(spec: ModelSpec, lanes: int) -> ModelSpec:
    """Return a copy with other `train.micro_batch_size`."""
    return spec._replace(train=replace(spec.train, micro_batch_size=lanes))


def _count(spec: ModelSpec, *, on_gpu: bool, keeps_gradients: bool, forward_in: str | None) -> MicroBatchCost:
    train, learns = spec.train, forward_in is None
    dtype = DTYPES[forward_in or train.precision]
    num_segments = train.bptt_segments if learns else 1
    shape = (train.micro_batch_size, num_segments * train.seg_len)
    with torch.device("meta"), plan_for("cuda" if on_gpu else "cpu"), _runs_on_meta(spec.memory):
        model = _build(spec).to(dtype).train(learns)
        tokens = torch.zeros(shape, dtype=torch.int64)
        lane_ids = torch.zeros(shape[0], dtype=torch.int64)
        valid_len = lane_ids if num_segments == 1 else torch.zeros(shape[0], num_segments, dtype=torch.int64)
        text = window.Text(tokens, tokens, valid_len, [None] * num_segments)
        state = model.init_state(lane_ids, "meta", dtype)
        if not keeps_gradients:
            _drop_gradients(model)
        shares = expected_shares(spec.model, spec.vocab_size)
        if on_gpu and learns:
            _drop_as_a_gpu(model)
        _set_rows_by_bin(model, shares)
        with torch.no_grad(), Allocations(shares):  # constants that layers compute once and share are no part of it
            window.read(window.PlainAutograd(model), text, state, recomputes=False)
        with torch.set_grad_enabled(learns), Allocations(shares) as counted:
            found = window.read(window.PlainAutograd(model), text, state, recomputes=backwards_of_window(train) > 1)
            kept = counted.live.now
            if learns:
                found.begin_backward(lambda nll, aux: nll + aux)
                found.end_backward()
            del found
    return MicroBatchCost(counted.live.peak, kept, [(1.0, work) for work in counted.kernels])


def _set_rows_by_bin(model: MemoryLM, shares: list[float]) -> None:
    """Let later bins of an adaptive vocabulary have these shares of the targets; see `Softmax.rows_by_bin`."""

    def expected_rows(targets: Tensor) -> tuple[Tensor, list[int]]:
        counts = [math.ceil(share * targets.numel()) for share in shares]
        return torch.empty_like(targets), [targets.numel() - sum(counts), *counts]

    setattr(model.head, "rows_by_bin", expected_rows)  # noqa: B010


def _drop_as_a_gpu(model: nn.Module) -> None:
    """Let dropout keep one byte an element, as on a GPU; without values it would keep its input's type."""
    for module in model.modules():
        if isinstance(module, Dropout) and module.keep < 2**16:
            dropped = 1.0 - module.keep / 2**16
            setattr(module, "forward", lambda x, dropped=dropped: torch.native_dropout(x, dropped, True)[0])  # noqa: B010


def _drop_gradients(model: nn.Module) -> None:
    """Free every gradient as soon as it is complete, as ZeRO does once it has sent it."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hook: Callable[[Tensor], None] = drop
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(hook)

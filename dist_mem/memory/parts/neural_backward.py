"""`neural_memory.learn` with a backward of its own: it keeps few states and little of the tokens, in few kernels.

Autograd keeps the weights and the momentum after every chunk. Here every k-th is kept, and the backward computes the
others again, k at a time in one block after the other. What the network computed for tokens is kept, from which states
follow without another pass through the network; k is such that the kept states take as much memory (`group_size`).

Learning does not depend on queries, so a loop over chunks has only what depends on the chunk before, and k chunks are
read at once. On a GPU a chunk is one compiled function that is called in a loop, and `rank_update` writes its states.
The reference is `learn`, to which values and gradients are equal but for rounding (tests/memory/test_titans.py).

Names of a network's layer i: its rows x_i, x_1 being the keys, its sums h_i = x_i W_i, its gradient g_i, half of that
of the error by h_i, and p_i = g_(i+1) W_(i+1)^T, so that g_i = SiLU'(h_i) p_i. Shape letters: B lanes, N chunks, C
tokens of a chunk, G = k B of a group of k chunks, D model, I and O widths before and after a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.parts.neural_memory import LearningResult, NeuralTokens, Weights, decays, mixture
from dist_mem.memory.parts.neural_steps import (
    activate,
    add,
    asked_gradients,
    both_factors,
    columns_of,
    difference,
    inner_gradient,
    key_and_value,
    mix,
    mix_and_activate,
    of_momentum,
    of_weights,
    pair_gradients,
    pass_back,
    push_gradients,
    push_token,
    row_gradients,
    scale_gradient,
    sides,
    squares,
    weigh_shares,
)
from dist_mem.memory.parts.rank_update import LayerUpdate, rank_update
from dist_mem.nn.compilation import compile_or_note
from dist_mem.nn.distance_attention import why_not

Tensors = tuple[Tensor, ...]


class Chunks(NamedTuple):
    """What the network learns from and is read with, and what the rates give; of one chunk without the axis N."""

    query: Tensor  # (N, B, C, D)
    key: Tensor  # (N, B, C, D)
    value: Tensor  # (N, B, C, D)
    step: Tensor  # (N, B, C), theta
    left: Tensor  # (N, B, C), share of the weights before the chunk
    since: Tensor  # (N, B, C), share of the momentum before the chunk
    shares: Tensor  # (N, B, C, C), of every token's gradient in the weights at a token, without its step
    last: Tensor  # (N, B, C), of every token's gradient in the momentum after the chunk, without its step
    mix: Tensor  # (N, B, 3), what the chunk leaves of the weights, adds of the momentum, and leaves of the momentum


class ForwardValues(NamedTuple):
    """What the network computed for keys; of a chunk (B, C, .), of a group (G, C, .)."""

    hidden: Tensors  # h_i (., O_i), without the last layer
    asked: Tensors  # p_i (., O_i), without the last layer
    missing: Tensor  # (., D), what the network returned minus the value: g of the last layer
    scale: Tensor  # (B, C), factor of a token's gradient g: twice its step, limited


def group_size(chunks: Chunks, weights: Weights) -> int:
    """Return k: as many states are kept as take the memory of what is kept of the tokens.

    Where a number up to twice k divides the chunks, it is taken instead: groups of one size share their graphs.
    """
    num_chunks, num_lanes, chunk_len, _ = chunks.key.shape
    of_tokens = 4 * chunks.key[0].numel() + 3 * num_lanes * chunk_len * sum(layer.shape[-1] for layer in weights[:-1])
    num_kept = num_chunks * of_tokens // (2 * sum(layer.numel() for layer in weights))
    least = -(-num_chunks // (1 + num_kept))
    return next((size for size in range(least, 2 * least) if num_chunks % size == 0), least)


def learn(
    tokens: NeuralTokens,
    weights: Weights,
    momentum: Weights,
    *,
    chunk_len: int,
    max_gradient: float | None = None,
    tf32: bool = False,
) -> LearningResult:
    """Let the network learn a segment, as `neural_memory.learn`; its error has no gradient.

    Args:
        tf32: on GPUs, products may take TF32, with sums and states in float32.
    """
    seg_len = tokens.step.shape[1]
    chunks = in_chunks(tokens, chunk_len)
    num_layers, keeps = len(weights), torch.is_grad_enabled()
    settings = LearningSettings(num_layers, group_size(chunks, weights), max_gradient, tf32)
    read, error, *states = _LearnChunks.apply(settings, keeps, *chunks, *weights, *momentum)
    read, error = (rows.transpose(0, 1).flatten(1, 2)[:, :seg_len] for rows in (read, error))
    parts = [state.chunk(2, dim=-1) for state in states]
    new, speed = (tuple(part[place].contiguous() for part in parts) for place in (0, 1))
    return LearningResult(read, new, speed, error)


def in_chunks(tokens: NeuralTokens, chunk_len: int) -> Chunks:
    """Cut a segment into chunks, the last filled up with padding, and compute the shares of their tokens."""
    seg_len = tokens.step.shape[1]
    size = min(chunk_len, seg_len)
    padding = -seg_len % size

    def split_chunks(part: Tensor) -> Tensor:
        if padding:
            part = F.pad(part, (*(0, 0) * (part.dim() - 2), 0, padding))
        return part.unflatten(1, (-1, size)).transpose(0, 1).contiguous()

    one = NeuralTokens(*map(split_chunks, tokens))
    left, since, shares = mixture(one)
    mix = torch.stack([left[..., -1], since[..., -1], one.momentum.sum(-1).exp()], dim=-1)
    return Chunks(*one[:4], left, since, shares, decays(one.momentum)[..., -1, :], mix)


class LearningSettings(NamedTuple):
    """What is no tensor."""

    num_layers: int
    every: int  # k
    max_gradient: float | None
    tf32: bool


class _LearnChunks(torch.autograd.Function):
    """Chunks, weights and momentum -> what tokens read (N, B, C, D), their errors (N, B, C), states (B, I, 2 O)."""

    @staticmethod
    def forward(ctx: Any, settings: LearningSettings, keeps: bool, *given: Tensor) -> Tensors:
        run = forward if given[0].is_meta else torch.ops.dist_mem.titans_learn
        found = run([part.detach() for part in given], *settings, keeps)  # the compiler warns of gradients of views
        num_outputs = 2 + settings.num_layers
        ctx.settings = settings
        ctx.save_for_backward(*given, *found[num_outputs:])
        ctx.mark_non_differentiable(found[1])
        return tuple(found[:num_outputs])

    @staticmethod
    def backward(ctx: Any, of_read: Tensor, _: Tensor, *of_states: Tensor) -> tuple[Tensor | None, ...]:
        saved = [part.detach() for part in ctx.saved_tensors]
        run = backward if saved[0].is_meta else torch.ops.dist_mem.titans_learn_backward
        return None, None, *run(of_read, list(of_states), saved, *ctx.settings)


def choose_call(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """Return the function; for a GPU compiled, if the compiler's kernels run there and it is no check in float64."""
    is_plain = like.device.type != "cuda" or like.dtype == torch.float64 or why_not()
    return function if is_plain else compile_or_note(function)


@contextmanager
def products_in(*, tf32: bool) -> Iterator[None]:
    """Let products of float32 on GPUs take TF32 if `tf32`; if not, only where they may anyway (`train.tf32`)."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def groups(num_chunks: int, every: int) -> list[slice]:
    """Return the chunks of each group."""
    return [slice(begin, min(begin + every, num_chunks)) for begin in range(0, num_chunks, every)]


def merge_parts(parts: Sequence[Tensor]) -> Tensors:
    """Merge chunks and lanes of a group, as one axis of products."""
    return tuple(part.flatten(0, 1) for part in parts)


def forward(
    given: list[Tensor], num_layers: int, every: int, max_gradient: float | None, tf32: bool, keeps: bool
) -> list[Tensor]:
    """Return what tokens read, their errors, the states after the segment, and what `backward` needs if it is kept."""
    chunks = Chunks(*given[: len(Chunks._fields)])
    begun = given[len(Chunks._fields) :]
    after = [torch.cat(pair, dim=-1) for pair in zip(begun[:num_layers], begun[num_layers:], strict=True)]
    learn_one, read_group = (choose_call(function, chunks.key) for function in (learn_chunk, read_chunks))
    read, errors, kept = [], [], []
    buffers = [state.new_empty(every, *state.shape) for state in after]
    with products_in(tf32=tf32):
        for group in groups(len(chunks.key), every):
            if keeps and group.start:
                kept += [state.clone() for state in after]
            size = group.stop - group.start
            states = [buffer[:size] for buffer in buffers]  # before every chunk of the group
            for part, state in zip(states, after, strict=True):
                part[0].copy_(state)
            found = []
            for place, index in enumerate(range(group.start, group.stop)):
                one = Chunks(*(part[index] for part in chunks))
                now = [part[place] for part in states]
                passed, rows, columns = learn_one(one, now, max_gradient)
                nexts = [part[place + 1] for part in states] if place + 1 < size else after
                parts = zip(now, rows, columns, nexts, strict=True)
                rank_update([LayerUpdate(state, [row], [column], new) for state, row, column, new in parts], one.mix)
                found.append(passed)
            passed = gather_chunks(found)
            mine = Chunks(*merge_parts([part[group] for part in chunks]))
            rows, sums = read_group(mine, passed, [part.flatten(0, 1) for part in states])
            read.append(rows.unflatten(0, (size, -1)))
            errors.append(squares(passed.missing)[0].unflatten(0, (size, -1)))
            if keeps:
                kept += [*passed.hidden, *passed.asked, passed.missing, passed.scale, *sums]
    return [torch.cat(read), torch.cat(errors), *after, *kept]


def learn_chunk(one: Chunks, states: Sequence[Tensor], max_gradient: float | None) -> tuple[ForwardValues, Any, Any]:
    """Return what the network computes for a chunk, and rows and columns of its `rank_update` in every layer."""
    rows, hidden = [one.key], []
    for state in states[:-1]:
        hidden.append(torch.bmm(rows[-1], of_weights(state)))
        rows += activate(hidden[-1])
    (missing,) = difference(torch.bmm(rows[-1], of_weights(states[-1])), one.value)
    asked: list[Tensor] = []
    gradient = missing
    for state, sums in zip(reversed(states[1:]), reversed(hidden), strict=True):
        asked.insert(0, torch.bmm(gradient, of_weights(state).mT))
        if len(asked) < len(hidden):
            (gradient,) = inner_gradient(sums, asked[0])
    scale, *columns = push_token(
        one.step, one.shares[:, -1], one.last, one.key, hidden, asked, missing, max_gradient=max_gradient
    )
    return ForwardValues(tuple(hidden), tuple(asked), missing, scale), rows, columns


def gather_chunks(found: Sequence[ForwardValues]) -> ForwardValues:
    """Return what was computed for the chunks of a group."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    hidden, asked = (
        tuple(map(join, zip(*parts, strict=True)))
        for parts in ([one.hidden for one in found], [one.asked for one in found])
    )
    return ForwardValues(hidden, asked, join([one.missing for one in found]), join([one.scale for one in found]))


def read_chunks(mine: Chunks, passed: ForwardValues, states: Sequence[Tensor]) -> tuple[Tensor, Tensors]:
    """Return what the tokens of a group read, (G, C, D), and their sums in all layers but the last."""
    inputs, gradients = factors(mine.key, passed)
    rows, sums = mine.query, []
    for index, (state, one, gradient) in enumerate(zip(states, inputs, gradients, strict=True)):
        both, pairs = torch.bmm(rows, state), torch.bmm(rows, one.mT)
        (weighted,) = weigh_shares(pairs, mine.shares, passed.scale)
        of_chunk = torch.bmm(weighted, gradient)
        if index == len(states) - 1:
            (rows,) = mix(both, mine.left, mine.since, of_chunk)
        else:
            total, rows = mix_and_activate(both, mine.left, mine.since, of_chunk)
            sums.append(total)
    return rows, tuple(sums)


def factors(key: Tensor, passed: ForwardValues) -> tuple[list[Tensor], list[Tensor]]:
    """Return x_i and g_i of every layer."""
    if not passed.hidden:
        return [key], [passed.missing]
    found = both_factors(passed.hidden, passed.asked)
    number = len(passed.hidden)
    return [key, *found[:number]], [*found[number:], passed.missing]


def backward(
    of_read: Tensor,
    of_states: list[Tensor],
    saved: list[Tensor],
    num_layers: int,
    every: int,
    max_gradient: float | None,
    tf32: bool,
) -> list[Tensor]:
    """Return the gradients of the chunks, of weights and of momentum."""
    num_parts = len(Chunks._fields)
    chunks, begun = Chunks(*saved[:num_parts]), saved[num_parts : num_parts + 2 * num_layers]
    kept = saved[num_parts + 2 * num_layers :]
    gradients, found = [part.contiguous() for part in of_states], []
    with products_in(tf32=tf32):
        for group in reversed(groups(len(chunks.key), every)):
            num_kept = 3 * (num_layers - 1) + 2 + (num_layers if group.start else 0)
            kept, mine = kept[:-num_kept], kept[-num_kept:]
            if group.start:
                first, mine = mine[:num_layers], mine[num_layers:]
            else:
                pairs = zip(begun[:num_layers], begun[num_layers:], strict=True)
                first = [torch.cat(pair, dim=-1) for pair in pairs]
            inner = num_layers - 1
            passed = ForwardValues(
                tuple(mine[:inner]), tuple(mine[inner : 2 * inner]), *mine[2 * inner : 2 * inner + 2]
            )
            part = Chunks(*(part[group] for part in chunks))
            of_group, gradients = group_backward(
                part, passed, mine[2 * inner + 2 :], first, of_read[group], gradients, max_gradient
            )
            found.append(of_group)
    whole = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*reversed(found), strict=True)]
    return [*whole, *map(of_weights, gradients), *map(of_momentum, gradients)]


def group_backward(
    chunks: Chunks,
    passed: ForwardValues,
    sums: Sequence[Tensor],
    first: Sequence[Tensor],
    of_read: Tensor,
    gradients: Sequence[Tensor],
    max_gradient: float | None,
) -> tuple[Chunks, list[Tensor]]:
    """Return the gradients of a group's chunks and of the states before it, from those of the states after it."""
    size, num_lanes = chunks.key.shape[:2]
    mine = Chunks(*merge_parts(chunks))
    inputs, inner = factors(mine.key, passed)
    columns = columns_of(mine.shares[:, -1], mine.last, passed.scale, inner)
    cut = partial(cut_lanes, num_lanes=num_lanes)
    states = [state.new_empty(size, *state.shape) for state in first]
    for part, state in zip(states, first, strict=True):
        part[0].copy_(state)
    for place in range(size - 1):
        updates = [
            LayerUpdate(part[place], [cut(row, place)], [cut(column, place)], part[place + 1])
            for part, row, column in zip(states, inputs, columns, strict=True)
        ]
        rank_update(updates, chunks.mix[place])
    flat = [part.flatten(0, 1) for part in states]
    given_read = of_read.flatten(0, 1)
    reading = choose_call(read_backward, mine.key)(mine, passed.scale, inputs, inner, sums, flat, given_read)
    one_backward = choose_call(chunk_backward, mine.key)
    given, found = list(gradients), []
    of_mix: list[Tensor] = []
    for place in reversed(range(size)):
        at = partial(cut, place=place)
        one = Chunks(*(part[place] for part in chunks))
        of_chunk = ForwardValues(*(tuple(map(at, part)) for part in passed[:2]), *map(at, passed[2:]))  # type: ignore[arg-type]
        of_one, of_sums, of_asked = one_backward(
            one,
            of_chunk,
            [at(part) for part in inputs],
            [at(part) for part in inner],
            [at(part) for part in columns],
            [part[place] for part in states],
            given,
            at(reading.scale),
            [at(part) for part in reading.inputs],
            [at(part) for part in reading.gradients],
            max_gradient,
        )
        updates = []
        for layer, part in enumerate(states):
            rows = [at(reading.rows[layer]), at(inputs[layer]), *of_asked[layer - 1 : layer]]
            cols = [at(reading.columns[layer]), of_sums[layer], *([at(inner[layer])] if layer else [])]
            updates.append(LayerUpdate(given[layer], rows, cols, torch.empty_like(part[place]), part[place]))
        of_mix = [*rank_update(updates, one.mix), *of_mix]
        given = [one.out for one in updates]
        found.append((*of_one, of_sums[0], of_sums[-1]))
    of_step, of_alpha, of_last, partial_key, of_first, of_missing = (
        torch.stack(part) for part in zip(*reversed(found), strict=True)
    )
    of_key = torch.bmm(of_first.flatten(0, 1), of_weights(flat[0]).mT)
    of_key, of_value = key_and_value(of_key.view_as(partial_key), partial_key, of_missing)
    of_shares = reading.shares.view_as(chunks.shares)
    of_shares[..., -1, :] += of_alpha
    reads = (reading.query, reading.left, reading.since)
    of_query, of_left, of_since = (part.unflatten(0, (size, num_lanes)) for part in reads)
    mix = torch.cat(of_mix, dim=1).unflatten(1, (size, -1)).sum(2).transpose(0, 1)
    return Chunks(of_query, of_key, of_value, of_step, of_left, of_since, of_shares, of_last, mix), given


def cut_lanes(part: Tensor, place: int, *, num_lanes: int) -> Tensor:
    """Return what a tensor of a group, (G, ...), has of one chunk."""
    return part[place * num_lanes : (place + 1) * num_lanes]


class OfReading(NamedTuple):
    """Gradients that the reading of a group has, of (G, ...)."""

    query: Tensor
    left: Tensor
    since: Tensor
    shares: Tensor
    scale: Tensor
    inputs: list[Tensor]  # of x_i
    gradients: list[Tensor]  # of g_i
    rows: list[Tensor]  # (G, C, I), what was read with: these times `columns` are the gradients of the states
    columns: list[Tensor]  # (G, C, 2 O)


def read_backward(
    mine: Chunks,
    scale: Tensor,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sums: Sequence[Tensor],
    states: Sequence[Tensor],
    of_read: Tensor,
) -> OfReading:
    """Return the gradients of `read_chunks`."""
    rows = [mine.query, *(activate(part)[0] for part in sums)]
    of_left, of_since = torch.zeros_like(mine.left), torch.zeros_like(mine.left)
    of_shares, of_scale = torch.zeros_like(mine.shares), torch.zeros_like(mine.left)
    of_inputs: list[Tensor] = []
    of_gradients: list[Tensor] = []
    columns: list[Tensor] = []
    given = of_read
    for layer in reversed(range(len(states))):
        row, one, gradient, state = rows[layer], inputs[layer], gradients[layer], states[layer]
        by_weights, by_momentum = (torch.bmm(given, part.mT) for part in (of_weights(state), of_momentum(state)))
        pairs, of_weighted = torch.bmm(row, one.mT), torch.bmm(given, gradient.mT)
        weighted, of_pairs, of_shares = pair_gradients(pairs, of_weighted, mine.shares, scale, of_shares)
        (of_scale,) = scale_gradient(pairs.mT, of_weighted.mT, mine.shares.mT, of_scale)
        of_gradients.insert(0, torch.bmm(weighted.mT, given))
        of_inputs.insert(0, torch.bmm(of_pairs.mT, row))
        columns.insert(0, sides(given, mine.left, mine.since)[0])
        arguments = by_weights, by_momentum, torch.bmm(of_pairs, one), mine.left, mine.since, row, of_left, of_since
        given, of_left, of_since = row_gradients(*arguments, sums[layer - 1 : layer] if layer else [])
    return OfReading(given, of_left, of_since, of_shares, of_scale, of_inputs, of_gradients, rows, columns)


def chunk_backward(
    one: Chunks,
    passed: ForwardValues,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    columns: Sequence[Tensor],
    states: Sequence[Tensor],
    given: Sequence[Tensor],
    of_scale: Tensor,
    of_inputs: Sequence[Tensor],
    of_gradients: Sequence[Tensor],
    max_gradient: float | None,
) -> tuple[Tensors, list[Tensor], list[Tensor]]:
    """Return the gradients of a chunk, from those of the state after it and those of its reading.

    Returns:
        Of step, of the last token's shares, of `last` (B, C), and of the keys (B, C, D), without what passes through
        h_1. Of h_i of every layer, that of the last being the missing. Of p_i.
    """
    last = len(inputs) - 1
    by_rows = [torch.bmm(row, each) for row, each in zip(inputs, given, strict=True)]
    by_columns = [torch.bmm(column, each.mT) for column, each in zip(columns, given, strict=True)]
    of_step, of_alpha, of_kept, *rest = push_gradients(
        *(one.step, one.shares[:, -1], one.last, passed.scale, of_scale),
        *(inputs, gradients, by_rows, by_columns, of_inputs, of_gradients),
        max_gradient=max_gradient,
    )
    to_inputs, to_gradients = rest[: last + 1], rest[last + 1 :]
    of_sums: list[Tensor] = []
    of_asked: list[Tensor] = []
    total = to_gradients[0]
    for layer in range(last):
        asked, curved = asked_gradients(passed.hidden[layer], passed.asked[layer], total)
        of_asked.append(asked)
        of_sums.append(curved)
        (total,) = add(to_gradients[layer + 1], torch.bmm(asked, of_weights(states[layer + 1])))
    of_sums.append(total)
    for layer in range(last, 0, -1):
        passing = torch.bmm(of_sums[layer], of_weights(states[layer]).mT)
        (of_sums[layer - 1],) = pass_back(of_sums[layer - 1], passed.hidden[layer - 1], to_inputs[layer], passing)
    return (of_step, of_alpha, of_kept, to_inputs[0]), of_sums, of_asked


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_SETTINGS = "int num_layers, int every, float? max_gradient, bool tf32"
_OPS.define(f"titans_learn(Tensor[] given, {_SETTINGS}, bool keeps) -> Tensor[]")
_OPS.define(f"titans_learn_backward(Tensor of_read, Tensor[] of_states, Tensor[] saved, {_SETTINGS}) -> Tensor[]")
_OPS.impl("titans_learn", forward, "CompositeExplicitAutograd")
_OPS.impl("titans_learn_backward", backward, "CompositeExplicitAutograd")

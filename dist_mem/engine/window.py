"""Forward and backward of a window: successive segments through whose states gradients flow (`train.bptt_segments`).

    read -> WindowRead -> its backward

Kept whole, a window needs the activations of all its segments until its one backward. By segments
(`train.activation_checkpointing: segments`) only the states between segments are kept: the backward runs from the last
segment to the first, computes each of them again with the same random numbers, and hands the gradient of the state that
it read to the segment before it, one backward of the engine for each segment. Shape letters: B lanes, T segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dist_mem.block import rehearsal
from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.model import DocumentStarts, LMOutput, LMState, MemoryLM, join_segments, reset_lanes, split_segments

Loss = Callable[[Tensor, Tensor], Tensor]  # of the summed nll and auxiliary losses, () each


class Differentiator(Protocol):
    """What runs the model and its backward: `Engine`, or `PlainAutograd`."""

    @property
    def module(self) -> MemoryLM: ...

    @property
    def loss_scale(self) -> float:
        """The factor of all gradients of a backward."""

    def __call__(self, *args: Tensor, state: LMState, later: Sequence[DocumentStarts | None] = ()) -> LMOutput: ...

    def backward(self, loss: Tensor) -> None: ...

    def end_micro_batch(self) -> None:
        """Count a backward that is not the last of its update."""


class PlainAutograd:
    """The model and its backward without an engine."""

    loss_scale = 1.0

    def __init__(self, model: MemoryLM) -> None:
        self.module = model

    def __call__(self, *args: Tensor, state: LMState, later: Sequence[DocumentStarts | None] = ()) -> LMOutput:
        output: LMOutput = self.module(*args, state=state, later=later)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def end_micro_batch(self) -> None:
        pass


class Text(NamedTuple):
    """What a window of n segments reads."""

    tokens: Tensor  # (B, n T) int64
    targets: Tensor  # (B, n T) int64
    valid_len: Tensor  # (B, n) int64; of one segment (B,)
    starts: Sequence[
        DocumentStarts | None
    ]  # of every segment, the lanes that begin a document in it, None if none does


class WindowRead(NamedTuple):
    """What a window gave, all without gradient, and its backward."""

    nll: Tensor  # (B, n T) float32, as in LMOutput
    aux: Tensor  # () float32, the auxiliary losses, summed
    logs: Mapping[str, Tensor]  # as in LMOutput: (B, n), of one segment (B,)
    state: LMState
    backward: Callable[[Loss], None]  # to be called once, or never


def read(run: Differentiator, text: Text, state: LMState, *, recomputes: bool) -> WindowRead:
    """Read a window, with a gradient where one is enabled.

    Args:
        recomputes: keep the states between segments alone, and compute the segments again in the backward.
    """
    if recomputes and torch.is_grad_enabled() and len(text.starts) > 1:
        return _Recomputation(run, text, state).read()
    first, *later = text.starts
    state = state if first is None else reset_lanes(state, *first)
    output = run(text.tokens, text.targets, text.valid_len, state=state, later=later)
    sums = _sums(output)
    # The graph behind the last state is freed with it: no loss uses it.
    return _result(output, sums[1], lambda loss: run.backward(loss(*sums)))


def _sums(output: LMOutput) -> tuple[Tensor, Tensor]:
    """Return the summed nll and the summed auxiliary losses, () each."""
    nll = output.nll.sum()
    return nll, torch.stack([nll.new_zeros(()), *(loss.sum() for loss in output.aux.values())]).sum()


def _result(output: LMOutput, aux: Tensor, backward: Callable[[Loss], None]) -> WindowRead:
    return WindowRead(output.nll.detach(), aux.detach(), output.logs, detach_state(output.state), backward)


class _Border(NamedTuple):
    """A segment that the first forward has passed."""

    number: int
    state: LMState  # before it, without gradient
    random: tuple[Tensor, ...]  # states of the random generators before it


class _Recomputation:
    """A window of which the states between segments are kept."""

    def __init__(self, run: Differentiator, text: Text, state: LMState) -> None:
        self._run, self._state = run, state
        self._starts = text.starts
        device = text.tokens.device  # a GPU has a random generator of its own beside the CPU's
        self._devices = [device] if device.type == "cuda" else []
        self._segments = list(split_segments(text.tokens, text.targets, text.valid_len))
        self._passed = list[_Border]()
        self._last: tuple[Tensor, Tensor] | None = None  # the sums of the last segment, with the graph behind them
        self._leaves = dict[str, Tensor]()  # of the state before the segment whose backward comes next

    def read(self) -> WindowRead:
        state, outputs, last = self._state, list[LMOutput](), len(self._segments) - 1
        for number in range(last):
            self._passed.append(_Border(number, state, _random_states(self._devices)))
            with rehearsal():
                outputs.append(self._forward(number, state))
            state = outputs[-1].state
        output = self._forward(last, state)
        self._last = _sums(output)
        outputs.append(output._replace(state=detach_state(output.state)))
        del output
        whole = join_segments(outputs)
        return _result(whole, _sums(whole)[1], self._backward)

    def _forward(self, number: int, state: LMState) -> LMOutput:
        """Run a segment; the state before it, but the first, gets a gradient from its backward."""
        state, start = self._run.module.with_gradient(state) if number else state, self._starts[number]
        self._leaves = {name: part for name, part in named_tensors(state).items() if part.requires_grad}
        return self._run(*self._segments[number], state=state if start is None else reset_lanes(state, *start))

    def _backward(self, loss: Loss) -> None:
        assert self._last is not None
        total, self._last = loss(*self._last), None
        while True:
            self._run.backward(total)
            if not self._passed:
                return
            self._run.end_micro_batch()
            total = self._again(self._passed.pop(), loss)

    def _again(self, passed: _Border, loss: Loss) -> Tensor:
        """Compute a segment again; return its loss, with a term whose gradient is that of its last state."""
        after, scale = self._leaves, self._run.loss_scale
        with _replaying(passed.random, self._devices):
            output = self._forward(passed.number, passed.state)
        total = loss(*_sums(output))
        for name, part in named_tensors(output.state).items():
            if part.requires_grad and name in after and (gradient := after[name].grad) is not None:
                wide = torch.promote_types(part.dtype, torch.float32)
                total = total + (part.to(wide) * (gradient.to(wide) / scale)).sum()
        return total


def _random_states(devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
    return torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)


@contextmanager
def _replaying(random: tuple[Tensor, ...], devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw the random numbers of earlier states of the generators; afterwards those go on as before."""
    with torch.random.fork_rng(devices):
        torch.set_rng_state(random[0])
        for device, of_device in zip(devices, random[1:], strict=True):
            torch.cuda.set_rng_state(of_device, device)
        yield

"""Forward and backward of a window: successive segments through whose states gradients flow (`train.bptt_segments`).

    read -> WindowRead -> its backward

Kept whole, a window needs the activations of all its segments until its one backward. By segments
(`train.activation_checkpointing: segments`) only the states between segments are kept: the backward runs from the last
segment to the first, computes each of them again with the same random numbers, and hands the gradient of the state that
it read to the segment before it, one backward of the engine for each segment. Shape letters: B lanes, T segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


class WindowRead(Protocol):
    """What a window gave, all without gradient, and its backward in two parts."""

    aux: Tensor  # () float32, the auxiliary losses, summed
    logs: dict[str, Tensor]  # as in LMOutput: (B, n), of one segment (B,)
    state: LMState

    def begin_backward(self, loss: Loss) -> Tensor:
        """Run the backward but for its last part, and return nll, (B, n T) float32 as in LMOutput; to be called once.

        Without gradient it only returns nll.
        """

    def end_backward(self) -> None:
        """Run the last part; it may be left out."""


def read(run: Differentiator, text: Text, state: LMState, *, recomputes: bool) -> WindowRead:
    """Read a window, with a gradient where one is enabled.

    Args:
        recomputes: keep the states between segments alone, and compute the segments again in the backward.
    """
    if recomputes and torch.is_grad_enabled() and len(text.starts) > 1:
        return _Recomputation(run, text, state)
    first, *later = text.starts
    state = state if first is None else reset_lanes(state, *first)
    return _WholeWindow(run, run(text.tokens, text.targets, text.valid_len, state=state, later=later))


def _sums(output: LMOutput) -> tuple[Tensor, Tensor]:
    """Return the summed nll and the summed auxiliary losses, () each."""
    nll = output.nll.sum()
    return nll, torch.stack([nll.new_zeros(()), *(loss.sum() for loss in output.aux.values())]).sum()


class _WholeWindow:
    """A window whose activations are kept."""

    def __init__(self, run: Differentiator, output: LMOutput) -> None:
        self._run, self._sums, self._nll = run, _sums(output), output.nll.detach()
        # The graph behind the last state is freed with it: no loss uses it.
        self.aux, self.logs, self.state = self._sums[1].detach(), output.logs, detach_state(output.state)

    def begin_backward(self, loss: Loss) -> Tensor:
        self._loss = loss
        return self._nll

    def end_backward(self) -> None:
        self._run.backward(self._loss(*self._sums))


class _Border(NamedTuple):
    """A segment that the first forward has passed."""

    number: int
    state: LMState  # before it, without gradient
    random: tuple[Tensor, ...]  # states of the random generators before it


class _Recomputation:
    """A window of which the states between segments are kept; its first forward runs the head of the last one alone."""

    def __init__(self, run: Differentiator, text: Text, state: LMState) -> None:
        self._run, self._starts = run, text.starts
        device = text.tokens.device  # a GPU has a random generator of its own beside the CPU's
        self._devices = [device] if device.type == "cuda" else []
        self._segments = list(split_segments(text.tokens, text.targets, text.valid_len))
        self._passed = list[_Border]()
        self._leaves = dict[str, Tensor]()  # of the state before the segment whose backward comes next
        outputs = list[LMOutput]()
        for number in range(len(self._segments) - 1):
            self._passed.append(_Border(number, state, _random_states(self._devices)))
            with rehearsal():
                outputs.append(self._forward(number, state, has_targets=False))
            state = outputs[-1].state
        self._last = self._forward(len(outputs), state)
        self._last = self._last._replace(state=detach_state(self._last.state))
        whole = join_segments([*outputs, self._last])
        self.aux, self.logs, self.state = _sums(whole)[1].detach(), whole.logs, whole.state

    def begin_backward(self, loss: Loss) -> Tensor:
        nll = [self._last.nll.detach()]
        self._total = loss(*_sums(self._last))
        del self._last
        while self._passed:
            self._run.backward(self._total)
            self._run.end_micro_batch()
            of_segment, self._total = self._again(self._passed.pop(), loss)
            nll.append(of_segment)
        return torch.cat(nll[::-1], 1)

    def end_backward(self) -> None:
        self._run.backward(self._total)

    def _forward(self, number: int, state: LMState, *, has_targets: bool = True) -> LMOutput:
        """Run a segment; the state before it, but the first, gets a gradient from its backward."""
        state, start = self._run.module.with_gradient(state) if number else state, self._starts[number]
        self._leaves = {name: part for name, part in named_tensors(state).items() if part.requires_grad}
        tokens, targets, valid_len = self._segments[number]
        targets = targets if has_targets else targets[:, :0]
        return self._run(tokens, targets, valid_len, state=state if start is None else reset_lanes(state, *start))

    def _again(self, passed: _Border, loss: Loss) -> tuple[Tensor, Tensor]:
        """Compute a segment again; return nll, and the loss with a term whose gradient is that of the last state."""
        after, scale = self._leaves, self._run.loss_scale
        with _replaying(passed.random, self._devices):
            output = self._forward(passed.number, passed.state)
        total = loss(*_sums(output))
        for name, part in named_tensors(output.state).items():
            if part.requires_grad and name in after and (gradient := after[name].grad) is not None:
                wide = torch.promote_types(part.dtype, torch.float32)
                total = total + (part.to(wide) * (gradient.to(wide) / scale)).sum()
        return output.nll.detach(), total


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

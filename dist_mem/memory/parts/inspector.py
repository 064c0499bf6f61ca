"""Inspect the memories of a model in the forwards that it computes anyway.

with Inspector(model.memories()) as inspector:
    state = model(tokens, targets, valid_len, state=state).state
    inspector.layers[0].rows["memory"].weights
    inspector.commit()  # the segment was complete, so its state was kept
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from dist_mem.memory.base import Inspectable, Memory, MemoryState, carries_nothing
from dist_mem.memory.parts.inspection import Inspection


def inspect(memory: Memory, x: Tensor, state: MemoryState, valid_len: Tensor, trace: Any) -> Inspection:
    """Return what a memory reads, see `Inspectable.inspect`; nothing, if it does not say."""
    return memory.inspect(x, state, valid_len, trace) if isinstance(memory, Inspectable) else Inspection()


def forget(memory: Memory, state: MemoryState, begin: Tensor, end: Tensor, trace: Any) -> MemoryState:
    """Return a state without a passage, see `Inspectable.forget`.

    Raises:
        NotImplementedError: the memory carries something, and cannot forget.
    """
    if isinstance(memory, Inspectable):
        return memory.forget(state, begin, end, trace)
    if carries_nothing(memory, state):
        return state
    raise NotImplementedError(f"{type(memory).__name__} cannot forget a passage: it is no `Inspectable` memory")


class Inspector:
    """While entered, every forward of these memories is inspected; all lanes commit together, or none does."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = tuple(memories)
        self.layers = [Inspection() for _ in self.memories]  # of the last forward, in order from the embedding
        self.traces: list[Any] = [None for _ in self.memories]  # of the lanes' documents so far
        self._hooks = ExitStack()

    def __enter__(self) -> Inspector:
        for number, memory in enumerate(self.memories):
            handle = memory.register_forward_pre_hook(self._hook(number))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def _hook(self, number: int) -> Any:
        def hook(memory: nn.Module, inputs: tuple[Tensor, MemoryState, Tensor]) -> None:
            assert isinstance(memory, Memory)
            self.layers[number] = inspect(memory, *inputs, self.traces[number])

        return hook

    def forget(self, blocks: Sequence[MemoryState], begin: Tensor, end: Tensor) -> tuple[MemoryState, ...]:
        """Return the states of all blocks without the tokens in [begin, end); see `Inspectable.forget`."""
        parts = zip(self.memories, blocks, self.traces, strict=True)
        return tuple(forget(memory, state, begin, end, trace) for memory, state, trace in parts)

    def commit(self) -> None:
        """Go on from the segment that was read last."""
        self.traces = [layer.trace for layer in self.layers]

"""Stragglers: ranks whose forwards take longer than those of the others, so that all ranks wait for them.

    hooks time the forwards of an update -> each rank fills its slot in the next step's all-reduce
        -> rank 0 compares the medians of the last steps -> log, MLflow

At ZeRO stages 0 to 2, a rank works alone only in the forward: in backward and update, all ranks wait for the slowest.
At stage 3 the forward gathers parameters, so it waits too, and nothing is compared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

# Steps to compare; a rank that becomes slow is reported once over half of them are slow. Odd: one is the median.
WINDOW = 13
# Least excess of a slow rank: a few time slices of a busy machine, of which shorter forwards get one more or less.
LEAST_SECONDS = 0.02
_CALM = 0.5  # an episode ends when the excess falls to this share of the excess that begins one


class ForwardTimer:
    """Timer of a module's forwards in training on this rank; on a GPU it uses events, so that nothing waits."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []  # since the last `take`
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        if module.training:
            self._began = self._now()

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if module.training:
            self._spans.append((self._began, self._now()))

    def take(self) -> float:
        """Return the seconds of the forwards since the last call; the device must have finished, as after a step."""
        spans, self._spans = self._spans, []
        if self._is_cuda:
            return sum(began.elapsed_time(ended) for began, ended in spans) / 1000
        return sum(ended - began for began, ended in spans)


class Stragglers:
    """Comparison of the ranks' forward times. Every rank has one; that of rank 0 judges."""

    def __init__(self, timer: ForwardTimer | None, *, rank: int, nodes: Sequence[str], threshold: float) -> None:
        """Compare the times of `timer`; None: compare nothing.

        Args:
            nodes: of all ranks.
            threshold: a rank is slow if it takes more than this many times as long as the others.
        """
        self._timer, self._rank, self._nodes, self._threshold = timer, rank, nodes, threshold
        self._seconds = np.zeros((WINDOW, len(nodes)))
        self._count = -1  # leaves out the first step, which compiles and loads
        self._slow: set[int] = set()  # ranks that are slow now
        self._episodes: Counter[int] = Counter()  # how often each rank has become slow
        self._slow_steps: Counter[int] = Counter()
        self.worst: float | None = None  # largest ratio in the last steps

    def own_slots(self) -> list[float]:
        """Return this rank's part of the step's all-reduce: a slot per rank, with its own time of the last step."""
        if self._timer is None:
            return []
        slots = [0.0] * len(self._nodes)
        slots[self._rank] = self._timer.take()
        return slots

    def update(self, slots: Sequence[float]) -> list[str]:
        """Take the slots of all ranks; return the messages to log, on rank 0."""
        if not slots or self._rank != 0:
            return []
        if 0.0 in slots:  # first step of this start: it has no previous step
            return []
        self._count += 1
        self._seconds[self._count % WINDOW] = slots
        return self._judge() if self._count >= WINDOW else []

    def _judge(self) -> list[str]:
        medians = np.median(self._seconds, axis=0)
        others = _median_of_others(medians)
        ratios = medians / others
        self.worst = float(ratios.max())
        is_slow = (ratios > self._threshold) & (medians - others > LEAST_SECONDS)
        is_calm = ratios < 1 + _CALM * (self._threshold - 1)
        messages = []
        for rank in np.flatnonzero(is_slow).tolist():
            if rank not in self._slow:
                self._slow.add(rank)
                self._episodes[rank] += 1
                messages += self._describe_start(rank, float(ratios[rank]))
        for rank in [rank for rank in sorted(self._slow) if is_calm[rank]]:
            self._slow.remove(rank)
            if self._episodes[rank] == 1:
                messages.append(f"{self._name(rank)} is as fast as the others again")
        self._slow_steps.update(self._slow)
        return messages

    def _describe_start(self, rank: int, ratio: float) -> list[str]:
        """Return the message for a new episode: for a rank's first, then its 2nd, 4th, 8th, ..., with a count."""
        number = self._episodes[rank]
        report = f"{self._name(rank)} takes {ratio:.1f} times as long as the others"
        if number == 1:
            return [f"{report} in a forward"]
        if number & (number - 1):
            return []
        ordinal = f"{number}nd" if number % 10 == 2 and number % 100 != 12 else f"{number}th"
        return [
            f"{report} again, for the {ordinal} time: in {self._slow_steps[rank]:,} of {self._count:,} steps so far"
        ]

    def summary(self) -> list[str]:
        """Return messages on the ranks that were slow more than once, for the end of a run."""
        return [
            f"{self._name(rank)} was slow {number:,} times, in {self._slow_steps[rank]:,} of {self._count:,} steps"
            for rank, number in sorted(self._episodes.items())
            if number > 1
        ]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._nodes[rank]})"


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each value the median of the others, (ranks,): removing one of n sorted values moves the median."""
    order = np.sort(values)
    number = len(values) - 1  # of the others
    low, high = (number - 1) // 2, number // 2
    place = np.searchsorted(order, values)  # of the removed value; later values move up
    return (order[low + (place <= low)] + order[high + (place <= high)]) / 2

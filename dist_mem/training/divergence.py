"""What is done about a divergence: a loss, a memory or a gradient that is not finite, or a loss that is a spike.

    step.py finds it, from sums over all ranks -> Divergence decides -> loop.py reports it, and rolls back

Every rank keeps a Divergence of its own and feeds it the same sums, so all decide the same in the same step. What it
remembers goes into the checkpoint: a resumed run judges the next loss as one that went straight on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from dist_mem.config import DivergenceConfig

SKIP, ROLLBACK = "skip", "rollback"
METRICS = {SKIP: "divergence/skipped", ROLLBACK: "divergence/rollbacks"}  # how often so far
_SIGMA = 1.4826  # standard deviation of a normal distribution of which the median absolute deviation is 1
_LEAST_SPREAD = 1e-3  # nats: a loss that hardly moves must not make a spike of every ripple


class DivergedError(RuntimeError):
    """Training cannot go on by itself; every rank raises it in the same step, before anything has changed."""


class Decision(NamedTuple):
    """What all ranks do instead of the update."""

    action: str  # SKIP or ROLLBACK
    step: int  # whose update was no good
    message: str  # step, reason, and what is done


class Divergence:
    """Judges the losses of a run and decides what is done."""

    def __init__(self, config: DivergenceConfig, saved: Mapping[str, Any] | None = None) -> None:
        """Begin a run, or go on where the one stood whose `state()` was saved."""
        saved = saved or {}
        self._config = config
        self.counts: dict[str, int] = {action: saved.get(action, 0) for action in METRICS}
        self.first_trained = saved.get("first_trained", 0)  # until this step updates are read and not trained on
        self._losses = deque[float](saved.get("losses", ()), maxlen=config.window)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON keeps every bit of it."""
        return {**self.counts, "first_trained": self.first_trained, "losses": list(self._losses)}

    def z_score(self, loss: float) -> float:
        """Robust z-score of a loss: its distance from the median of the window, in units of the window's spread.

        The spread is the median absolute deviation, scaled to the standard deviation of normal noise: no spike that is
        in the window can widen it. 0 until the window is full.
        """
        if len(self._losses) < self._config.window:
            return 0.0
        center = median(self._losses)
        spread = _SIGMA * median(abs(past - center) for past in self._losses)  # nats
        return (loss - center) / max(spread, _LEAST_SPREAD)

    def judge(self, loss: float) -> str | None:
        """Why the global loss of an update, nats per token, is a spike; None if it is none."""
        limit = self._config.spike_z
        if limit is None or (z_score := self.z_score(loss)) <= limit:
            return None
        return f"the loss is a spike, z = {z_score:.1f} (divergence.spike_z = {limit:g})"

    def remember(self, loss: float) -> None:
        """Take the loss of an update that was applied, for others to be compared with."""
        if self._config.spike_z is not None:
            self._losses.append(loss)

    def decide(self, step: int, reason: str, *, loss: float) -> Decision:
        """What is done instead of the update of `step`; it counts.

        Raises:
            DivergedError: the run is to stop.
        """
        found = f"step {step}: {reason}; loss {loss:.4f}"
        action, most = self._config.action, self._config.max_times
        if action not in METRICS:
            raise DivergedError(f"{found}; nothing was updated")
        if sum(self.counts.values()) >= most:
            raise DivergedError(f"{found}; nothing was updated: divergence.max_times = {most} is used up")
        self.counts[action] += 1
        done = {SKIP: "the update is skipped", ROLLBACK: "rolling back"}[action]
        return Decision(action, step, f"{found}; {done} ({sum(self.counts.values())} of at most {most} times)")

    def roll_back(self, saved: Mapping[str, Any], *, first_trained: int) -> None:
        """Go on with the losses of a checkpoint's `state()`; what was counted since stays counted."""
        self._losses = deque(saved.get("losses", ()), maxlen=self._config.window)
        self.first_trained = first_trained

"""Handle divergence: a loss, memory or gradient that is not finite, or a loss spike.

    step.py detects it from sums over all ranks -> Divergence decides -> loop.py reports it, and rolls back

Every rank keeps a Divergence and passes it the same sums, so all ranks decide the same in the same step. Its state is
saved in the checkpoint: a resumed run judges the next loss as an uninterrupted run does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from dist_mem.config import DivergenceConfig
from dist_mem.errors import DivergedError

SKIP, ROLLBACK = "skip", "rollback"
METRICS = {SKIP: "divergence/skipped", ROLLBACK: "divergence/rollbacks"}  # number of times so far
_SIGMA = 1.4826  # standard deviation of a normal distribution whose median absolute deviation is 1
_LEAST_SPREAD = 1e-3  # nats; otherwise, where the loss hardly moves, every small change would be a spike


class Decision(NamedTuple):
    """The action that all ranks take instead of the update."""

    action: str  # SKIP or ROLLBACK
    step: int  # of the rejected update
    message: str  # names the step, the reason and the action


class Divergence:
    """Judges the losses of a run and decides on the action after a divergence."""

    def __init__(self, config: DivergenceConfig, saved: Mapping[str, Any] | None = None) -> None:
        """Start empty, or from a saved `state()`."""
        saved = saved or {}
        self._config = config
        self.counts: dict[str, int] = {action: saved.get(action, 0) for action in METRICS}
        self.first_trained = saved.get("first_trained", 0)  # updates before this step are read, but not trained on
        self._losses = deque[float](saved.get("losses", ()), maxlen=config.window)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint; JSON preserves it exactly."""
        return {**self.counts, "first_trained": self.first_trained, "losses": list(self._losses)}

    def z_score(self, loss: float) -> float:
        """Return the robust z-score of a loss: its distance from the window's median in units of the window's spread.

        The spread is the median absolute deviation, scaled to the standard deviation of normal noise, so that a spike
        in the window cannot widen it. The z-score is 0 until the window is full.
        """
        if len(self._losses) < self._config.window:
            return 0.0
        center = median(self._losses)
        spread = _SIGMA * median(abs(past - center) for past in self._losses)  # nats
        return (loss - center) / max(spread, _LEAST_SPREAD)

    def judge(self, loss: float) -> str | None:
        """Return why the global loss of an update (nats per token) is a spike; None if it is not."""
        limit = self._config.spike_z
        if limit is None or (z_score := self.z_score(loss)) <= limit:
            return None
        return f"the loss is a spike, z = {z_score:.1f} (divergence.spike_z = {limit:g})"

    def remember(self, loss: float) -> None:
        """Add the loss of an applied update to the window that later losses are compared with."""
        if self._config.spike_z is not None:
            self._losses.append(loss)

    def decide(self, step: int, reason: str, *, loss: float) -> Decision:
        """Choose and count the action to take instead of the update of `step`.

        Raises:
            DivergedError: the run must stop.
        """
        found = f"step {step}: {reason}; loss {loss:.4f}"
        action, most = self._config.action, self._config.max_times
        if action not in METRICS:
            raise DivergedError(f"{found}; nothing was updated", step)
        if sum(self.counts.values()) >= most:
            raise DivergedError(f"{found}; nothing was updated: divergence.max_times = {most} is used up", step)
        self.counts[action] += 1
        done = {SKIP: "the update is skipped", ROLLBACK: "rolling back"}[action]
        return Decision(action, step, f"{found}; {done} ({sum(self.counts.values())} of at most {most} times)")

    def roll_back(self, saved: Mapping[str, Any], *, first_trained: int) -> None:
        """Restore the losses of a checkpoint's `state()`; the counts of actions stay."""
        self._losses = deque(saved.get("losses", ()), maxlen=self._config.window)
        self.first_trained = first_trained

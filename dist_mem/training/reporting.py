"""Report what a run does: metrics, messages and tags, slow ranks, and the parts of its time.

Rank 0 alone records. An error in that is kept, stops all ranks after the next step, and is raised once that is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dist_mem.config import TrackingConfig
from dist_mem.engine.engine import Engine
from dist_mem.runtime.distributed import World
from dist_mem.supervision.stragglers import Stragglers
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.agreement import LocalFailure
from dist_mem.training.goodput import Goodput
from dist_mem.training.meter import Meter, allocator_counts, peak_memory_gb
from dist_mem.training.profile import Profile
from dist_mem.training.step import Outcome


def is_multiple(step: int, every: int | None) -> bool:
    """Return whether something done every `every` steps is due at this step; None: never."""
    return every is not None and step % every == 0


@dataclass(frozen=True)
class Reporting:
    """What a run records, and with what. Every rank has one, and makes the same calls."""

    rules: TrackingConfig
    total_steps: int
    world: World
    engine: Engine
    tracker: Tracker
    meter: Meter
    goodput: Goodput
    profile: Profile
    stragglers: Stragglers
    failure: LocalFailure

    def due(self, step: int) -> bool:
        """Return whether the metrics of training are logged at this step."""
        return step == self.total_steps or is_multiple(step, self.rules.every)

    def own_slots(self, step: int) -> list[float]:
        """Return this rank's part of the all-reduce of `step`: its time, and if it is logged the use of its memory."""
        slots = self.stragglers.own_slots()
        if not self.due(step):
            return slots
        memory = [0.0] * self.world.size
        memory[self.world.rank] = peak_memory_gb()
        return [*slots, *allocator_counts().values(), *memory]

    def run(self, step: int, outcome: Outcome, *, epoch: float) -> None:
        """Count the update just made, report ranks that became slow or recovered, and record metrics if due."""
        if not outcome.is_made:
            return
        if outcome.overflows:
            self.tracker.message(f"step {step}: {outcome.overflows} fp16 overflows; the loss scale is smaller now")
        self.meter.add(outcome.totals, epoch=epoch, logs=outcome.logs, is_read_only=outcome.is_read_only)
        slots, num_ranks = list(outcome.slots), self.world.size
        if self.due(step):
            self.meter.note({"peak_memory_gb": max(slots[-num_ranks:])})
            slots = slots[:-num_ranks]
            names = list(allocator_counts())
            self.meter.note(dict(zip(names, slots[len(slots) - len(names) :], strict=True)))
            slots = slots[: len(slots) - len(names)]
        messages = self.stragglers.update(slots)
        for message in messages:
            self.tracker.message(f"step {step}: {message}")
        if self.stragglers.worst is not None:
            self.meter.note({"straggler/ratio": self.stragglers.worst})
        if messages:
            self.tag(f"straggler.step_{step}", "; ".join(messages))
        if self.due(step):
            self.record(step, self.meter.read(self.engine) | self.goodput.metrics())

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step."""
        beat("recording")
        with self.failure.keep_error():
            self.tracker.log(step, metrics)

    def tag(self, name: str, message: str) -> None:
        """Tag the MLflow run with something that happened at a step."""
        with self.failure.keep_error():
            self.tracker.log_tags({f"dist_mem.{name}": message})

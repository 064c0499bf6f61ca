"""The parts of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dist_mem.config import to_yaml
from dist_mem.training.feed import Feed
from dist_mem.training.history import begin_part
from dist_mem.training.reporting import Reporting
from dist_mem.training.saving import Saving
from dist_mem.training.state import TrainState
from dist_mem.training.step import StepContext


@dataclass(frozen=True)
class Context(StepContext):
    """The parts of a run. They stay the same objects from its start to its end; some keep state of their own."""

    feed: Feed
    reporting: Reporting
    saving: Saving

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def begin_part(self, state: TrainState) -> None:
        """Begin a part of the run's history at a state; rank 0 writes it."""
        if self.world.rank == 0:
            begin_part(
                self.run_dir, to_yaml(self.config), self.world, state, first_trained=self.divergence.first_trained
            )

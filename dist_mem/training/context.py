"""The parts of a training run: a context that stays, and the state that every step advances."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dist_mem.checkpoint.saver import Saver
from dist_mem.config import Config
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.engine.engine import Engine
from dist_mem.runtime.distributed import World
from dist_mem.supervision.stragglers import Stragglers
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.divergence import Divergence
from dist_mem.training.feed import Feed
from dist_mem.training.goodput import Goodput
from dist_mem.training.local_failure import LocalFailure
from dist_mem.training.meter import Meter
from dist_mem.training.profile import Profile


class TrainState(NamedTuple):
    """The state of a run after `step` updates, on this rank; with that of the engine, a checkpoint restores it."""

    step: int
    memories: list[Any]  # one memory state per lane group
    cursors: Tensor  # (P, 3) int64
    validation: dict[str, Any] | None = None  # of the newest evaluation, as in checkpoint/retention.py


@dataclass(frozen=True)
class StepContext:
    """The parts of a run that an update needs."""

    config: Config
    world: World
    engine: Engine
    divergence: Divergence
    total_steps: int


@dataclass(frozen=True)
class Context(StepContext):
    """The parts of a run. They stay the same objects from its start to its end; some keep state of their own."""

    run_dir: Path
    splits: list[Index]  # the training split of every stage (data/curriculum.py), that of data.path last
    tokenizer: Tokenizer
    feed: Feed
    tracker: Tracker
    meter: Meter
    goodput: Goodput
    profile: Profile
    saver: Saver
    stragglers: Stragglers
    failure: LocalFailure
    commit: str | None  # of the running code, if known; only on rank 0
    sources: dict[str, str]  # of memories outside the package, as loaded by this job: name -> text
    lane_ids: Tensor  # (P,) int64

"""The data of a run on this rank: its updates, read one ahead, as every step announces the targets of the next one.

On a GPU they are copied while the previous update computes:

    prefetch thread (pinned memory) -> `DeviceTransfer.start`, on a stream of its own -> `on_device`, in the step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.config import DataConfig, TrainConfig
from dist_mem.data.batch import Batch, Copies, Update
from dist_mem.data.curriculum import CurriculumReader, curriculum_reader, with_ends
from dist_mem.data.mixture import MixturePlan, source_names
from dist_mem.data.plan import Plan
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.runtime.distributed import World, on_all_ranks, sum_over_ranks
from dist_mem.supervision.watchdog import UNWATCHED, beat
from dist_mem.training.agreement import LocalFailure
from dist_mem.training.meter import Meter
from dist_mem.training.state import TrainState


class Data(NamedTuple):
    """The opened data of a run."""

    tokenizer: Tokenizer
    splits: list[Index]  # as `data.curriculum.training_splits`
    evaluated: list[Index]


class DeviceTransfer:
    """Starts the copies; on CPUs there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def needs_pinned(self) -> bool:
        """Whether batches should be in pinned memory."""
        return self._stream is not None

    def start(self, update: Update) -> Update:
        """Return the update with copies on the device, which may still be under way; the host does not wait."""
        if self._stream is None:
            return update
        with torch.cuda.stream(self._stream):
            batches = [batch.to(self._device) for batch in update.batches]
            return update._replace(copies=Copies(batches, self._stream.record_event()))


def on_device(update: Update, device: torch.device) -> list[Batch]:
    """Return the batches on the device, for the current stream; the host does not wait."""
    if update.copies is None:
        return [batch.to(device) for batch in update.batches]
    stream = torch.cuda.current_stream(device)
    stream.wait_event(update.copies.copied)
    for batch in update.copies.batches:
        for part in batch:
            if part is not None:
                part.record_stream(stream)  # another stream has allocated it and must not reuse it too early
    return update.copies.batches


class Feed:
    """The current update of this rank, and the next one. Creating it is collective."""

    data: Data
    lane_ids: Tensor  # (P,) int64, of the lanes that this rank reads
    update: Update  # the current one
    scored: list[int]  # targets of each of its micro-batches, on all ranks

    def __init__(
        self,
        settings: tuple[DataConfig, TrainConfig],
        world: World,
        meter: Meter,
        failure: LocalFailure,
        *,
        data: Data,
        lane_ids: Tensor,
        state: TrainState,
    ) -> None:
        """Open the training data at a state.

        Raises:
            RunError: on every rank, if any cannot read its lanes.
        """
        self._settings, self._world, self._meter, self._failure = settings, world, meter, failure
        self.data, self.lane_ids = data, lane_ids
        self._transfer = DeviceTransfer(world.device)
        self._reader = self._open(state)

    @property
    def plan(self) -> Plan:
        """The plan of data.path."""
        return self._reader.plan

    @property
    def num_scored(self) -> int:
        """Targets of the current update, on all ranks."""
        return sum(self.scored)

    def _open(self, state: TrainState) -> CurriculumReader:
        world, (data, train), pin = self._world, self._settings, self._transfer.needs_pinned
        self._next: Update | None = None
        return on_all_ranks(
            lambda: curriculum_reader(
                with_ends(data, state.stage_ends),
                train,
                world_size=world.size,
                rank=world.rank,
                cursors=state.cursors,
                step=state.step,
                pin=pin,
                parts=state.mixture,
            ),
            f"reading {data.train_split}",
        )

    def restart(self, state: TrainState) -> None:
        """Read on from a state, dropping what was read ahead; collective. Call `read_first` or `advance` next."""
        self._reader.close()
        self._reader = self._open(state)

    def read_first(self) -> None:
        """Read the first update; collective.

        Raises:
            RunError: on every rank, if any cannot read it, or has failed before.
        """
        # The first shards of all lanes may be fetched now; the fetch has its own time limits.
        beat(UNWATCHED if is_remote(self._settings[0].path) else "reading data")
        scored = self.read_ahead()
        self._failure.raise_on_all_ranks()
        self.advance([int(count) for count in sum_over_ranks(scored, self._world.device)])

    def read_ahead(self) -> list[int]:
        """Read the next update; return the targets of its micro-batches on this rank.

        An error is kept: see `LocalFailure`.
        """
        with self._failure.keep_error():
            self._next = update = self._transfer.start(self._meter.time_next(self._reader))
            return update.scored
        return self.no_targets()

    def no_targets(self) -> list[int]:
        """Return the targets of an update that is not read: as many numbers as on the other ranks."""
        return [0] * self._reader.num_batches

    def advance(self, scored: Sequence[int]) -> None:
        """Make the next update the current one, the first one after `restart`; collective.

        Args:
            scored: targets of the micro-batches of the update that was read ahead, on all ranks.
        """
        if self._next is None:
            self.read_first()
        else:
            self.update, self.scored = self._next, list(scored)

    def use_of_sources(self, step: int) -> dict[str, float]:
        """Return metrics: what was begun of every source of a mixture after so many updates; none without one."""
        if not isinstance(self.plan, MixturePlan):
            return {}
        used = zip(source_names(self._settings[0]), self.plan.use_of_sources(step), strict=True)
        return {f"mixture/{name}/{key}": value for name, use in used for key, value in use._asdict().items()}

    def close(self) -> None:
        """End the thread that reads; may be called more than once."""
        self._reader.close()

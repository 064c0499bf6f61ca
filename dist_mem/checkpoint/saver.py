"""Save checkpoints in the background: a thread writes a snapshot while training continues.

The thread does not touch the training: it writes a copy, and the ranks agree over connections of their own. With
`checkpoint.background: false` the same code runs, and training waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.commit import WrittenCheckpoint, rehearse_checkpoint, write_checkpoint
from dist_mem.checkpoint.manifest import read_manifest, step_dir, write_manifest
from dist_mem.checkpoint.snapshot import Snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.runtime.distributed import World
from dist_mem.supervision.lease import refuse_if_taken_over
from dist_mem.supervision.side_channel import open_side_channel


class SavedCheckpoint(NamedTuple):
    """A checkpoint on disk, with its timings."""

    written: WrittenCheckpoint
    step: int
    seconds: float  # spent on writing
    stall_seconds: float  # that training waited for the snapshot, and for the writing where it did

    def __str__(self) -> str:
        written = f"{self.written.num_bytes / 1e6:,.1f} MB in {self.seconds:.2f} s"
        return f"step {self.step}: saved {self.written.path} ({written}; training waited {self.stall_seconds:.2f} s)"

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log."""
        return {
            "checkpoint/seconds": self.seconds,
            "checkpoint/stall_seconds": self.stall_seconds,
            "checkpoint/bytes": self.written.num_bytes,
        }


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Every rank has one and makes the same calls, except `has_failed`. Creating it is collective.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        rules: CheckpointConfig,
        *,
        flush_records: Callable[[], None] = lambda: None,
        broken: Sequence[Path] = (),
        expected_seconds: float = 0.0,
        step: int = 0,
    ) -> None:
        """Connect the ranks, and start the thread.

        Args:
            flush_records: see `write_checkpoint`.
            broken: see `set_aside`.
            expected_seconds: estimated duration of a save, used until one is measured.
            step: that training starts from.
        """
        self._run_dir, self._world, self._rules = run_dir, world, rules
        self._channel = open_side_channel(world)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._flight: Future[tuple[WrittenCheckpoint, float]] | None = None
        self.step = step  # of the newest save, or of the start: there is nothing new to save at this step
        self._stall_seconds = 0.0  # of the save in flight
        self._saved: list[SavedCheckpoint] = []  # not yet returned by `take_finished`
        self._flush_records = flush_records
        self.broken = list(broken)  # see `set_aside`
        self._last_began = time.monotonic()
        self._expected_seconds = expected_seconds
        self._longest_seconds: float | None = None

    def set_aside(self, broken: Sequence[Path]) -> None:
        """Rename checkpoints that were passed over to `.broken` when the next checkpoint is committed.

        Not earlier: if the disk of one rank did not answer, they may be intact at the next start. Not later: retention
        would count them, and delete them.
        """
        self.broken += broken

    def is_due(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last save; only rank 0 looks at its clock."""
        minutes = self._rules.every_minutes
        return self._world.rank == 0 and minutes is not None and time.monotonic() >= self._last_began + 60 * minutes

    def change_manifest(self, step: int, changes: Mapping[str, Any]) -> None:
        """Change keys of the manifest of a committed checkpoint, if this run has it; rank 0 does it.

        Raises:
            TakenOverError: another job has the run directory now.
            OSError: it cannot be written.
        """
        directory = step_dir(self._run_dir, step)
        if self._world.rank == 0 and directory.is_dir():
            refuse_if_taken_over(self._run_dir)
            self._flush_records()  # a manifest counts the points of the log
            write_manifest(directory, {**read_manifest(directory), **changes})

    def rehearse(self, snapshot: Snapshot) -> None:
        """Try before the first step what a save needs, see `rehearse_checkpoint` and its errors."""
        rehearse_checkpoint(snapshot, run_dir=self._run_dir, world=self._world, channel=self._channel)

    def save(self, snapshot: Snapshot, *, began: float) -> None:
        """Write a snapshot, in the background or before returning.

        Args:
            began: `time.perf_counter()` when training began to wait for the snapshot.

        Raises:
            UnfitError: on every rank, if any rank could not write its part of this save or of one still in flight.
        """
        self.wait()
        self._last_began = time.monotonic()
        self.step = snapshot.step
        broken, self.broken = self.broken, []  # the next save may give these names to good checkpoints
        self._flight = self._thread.submit(self._write, snapshot, broken)
        self._stall_seconds = time.perf_counter() - began
        if not self._rules.background:
            self.wait()

    def _write(self, snapshot: Snapshot, broken: Sequence[Path]) -> tuple[WrittenCheckpoint, float]:
        began = time.perf_counter()
        written = write_checkpoint(
            snapshot,
            run_dir=self._run_dir,
            world=self._world,
            channel=self._channel,
            rules=self._rules,
            flush_records=self._flush_records,
            broken=broken,
        )
        return written, time.perf_counter() - began

    def longest_seconds(self) -> float:
        """Return how long a save may take: the longest so far, or the time of the save in flight if that is longer."""
        in_flight = time.monotonic() - self._last_began if self._flight and not self._flight.done() else 0.0
        return max(self._expected_seconds if self._longest_seconds is None else self._longest_seconds, in_flight)

    def has_failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows; `wait` raises the error."""
        return self._flight is not None and self._flight.done() and self._flight.exception() is not None

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            UnfitError: on every rank, if any rank could not write its part.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            began = time.perf_counter()
            written, seconds = flight.result()
            self._longest_seconds = max(self._longest_seconds or 0.0, self._stall_seconds + seconds)  # copy and write
            self._stall_seconds += time.perf_counter() - began
            self._saved.append(SavedCheckpoint(written, self.step, seconds, self._stall_seconds))

    def take_finished(self) -> list[SavedCheckpoint]:
        """Return the checkpoints written since the last call, oldest first."""
        if self._flight is not None and self._flight.done() and not self.has_failed():
            self.wait()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Wait for the save in flight and release the resources. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._channel.close()

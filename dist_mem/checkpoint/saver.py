"""Saving beside the training: a snapshot goes to a thread that writes it while the next steps are made.

Nothing in that thread touches the training: what it writes is a copy, and the ranks agree in a group of their own. So
the very same happens with `checkpoint.background: false`, where the training waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dist_mem.checkpoint.commit import Written, write_checkpoint
from dist_mem.checkpoint.snapshot import Snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.runtime.distributed import SideChannel, World


class Saved(NamedTuple):
    """A checkpoint on disk, and what it took."""

    written: Written
    step: int
    seconds: float  # from the start of the writing to its end
    stall_seconds: float  # in which the training waited: for the snapshot, and for the writing where it did

    def __str__(self) -> str:
        what = f"{self.written.num_bytes:,} bytes, {self.written.num_files} files, {self.written.num_fsyncs} fsyncs"
        times = f"{self.seconds:.2f} s; training waited {self.stall_seconds:.2f} s"
        return f"step {self.step}: saved {self.written.path} ({what}, {times})"

    def figures(self) -> dict[str, float]:
        """What is logged of it."""
        return {
            "checkpoint/seconds": self.seconds,
            "checkpoint/stall_seconds": self.stall_seconds,
            "checkpoint/bytes": self.written.num_bytes,
        }


class Saver:
    """Writes a run's checkpoints, one at a time; every rank has one, and all are called alike, `failed` excepted.

    Opening it takes all ranks.
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
    ) -> None:
        """`broken`: as `set_aside` takes it. `expected_seconds`: what a save may take, as long as none is measured.

        `flush_records`: as `write_checkpoint` takes it.
        """
        self._run_dir, self._world, self._rules = run_dir, world, rules
        self._channel = SideChannel(world)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._flight: Future[tuple[Written, float]] | None = None
        self._step = 0  # of the flight
        self._stall_seconds = 0.0  # of the flight
        self._saved: list[Saved] = []  # not told yet
        self._flush_records = flush_records
        self._broken = list(broken)
        self._last_began = time.monotonic()
        self._expected_seconds = expected_seconds
        self._longest_seconds: float | None = None

    def set_aside(self, broken: Sequence[Path]) -> None:
        """Take the names of checkpoints that were passed over from them, when the next one is committed.

        Not now: if the disk of one rank did not answer, the next start may find them whole. Not later: retention would
        count them, and delete them.
        """
        self._broken += broken

    def is_due(self) -> bool:
        """Whether `checkpoint.every_minutes` are over since the last save; rank 0's clock speaks for all."""
        minutes = self._rules.every_minutes
        return self._world.rank == 0 and minutes is not None and time.monotonic() >= self._last_began + 60 * minutes

    def save(self, snapshot: Snapshot, *, began: float) -> None:
        """Write a snapshot, in the background or before this returns.

        Args:
            began: `time.perf_counter()` when the training began to wait for the snapshot.

        Raises:
            AgreedError: on every rank, if any could not write its part of this one, or of one still in flight.
        """
        self.wait()
        self._last_began = time.monotonic()
        self._step = snapshot.step
        broken, self._broken = self._broken, []  # the names may be those of good ones after this
        self._flight = self._thread.submit(self._write, snapshot, broken)
        self._stall_seconds = time.perf_counter() - began
        if not self._rules.background:
            self.wait()

    def _write(self, snapshot: Snapshot, broken: Sequence[Path]) -> tuple[Written, float]:
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
        """How long a save may take: as long as the longest one, or as one in flight has taken already."""
        in_flight = time.monotonic() - self._last_began if self._flight and not self._flight.done() else 0.0
        return max(self._expected_seconds if self._longest_seconds is None else self._longest_seconds, in_flight)

    def failed(self) -> bool:
        """Whether this rank knows already that the save in flight has failed; `wait` raises why."""
        return self._flight is not None and self._flight.done() and self._flight.exception() is not None

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            AgreedError: on every rank, if any could not write its part.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            began = time.perf_counter()
            written, seconds = flight.result()
            self._longest_seconds = max(self._longest_seconds or 0.0, self._stall_seconds + seconds)  # copying, writing
            self._stall_seconds += time.perf_counter() - began
            self._saved.append(Saved(written, self._step, seconds, self._stall_seconds))

    def finished(self) -> list[Saved]:
        """What has been written since this was last asked, oldest first."""
        if self._flight is not None and self._flight.done() and not self.failed():
            self.wait()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Wait, and leave. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._channel.close()

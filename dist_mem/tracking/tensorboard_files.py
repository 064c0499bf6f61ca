"""Event files for TensorBoard in RUN/tensorboard, which has the points of metrics.jsonl: every step once.

A resumed run begins another file, with the mark from which TensorBoard discards older points: they are made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_mem.runtime.files import fsync_path, make_folder, naming
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.mlflow.names import valid_text
from dist_mem.tracking.tracker import Point, Sink

FOLDER = "tensorboard"  # in the run directory
_NAME = "events.out.tfevents."  # + seconds; TensorBoard reads the files in the order of their names
_VERSION = "brain.Event:2"  # of files whose marks are obeyed


class TensorBoardFiles(Sink):
    """Writes every point as one event, which is in the file when `log` returns: a kill loses none."""

    def __init__(self, folder: Path, kept: Sequence[Point], *, first_step: int) -> None:
        """Begin a file for the points past `first_step`, the step the run continues from (0: a fresh start).

        Args:
            folder: of the event files; if it has none yet, the kept points are written first.
            kept: points up to `first_step`.
        """
        self._folder = folder
        make_folder(folder)
        is_new = not self._files()
        self._open(first_step)
        for point in kept if is_new else ():
            self.log(point)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_NAME}*"))

    def _open(self, step: int) -> None:
        """Begin a file, which is the last by its name, also on a node whose clock is behind."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        times = [path.name.removeprefix(_NAME).partition(".")[0] for path in self._files()]
        second = max([int(time.time()), *(int(text) + 1 for text in times if text.isdecimal())])
        self._path = self._folder / f"{_NAME}{second:010}.dist_mem"
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version=_VERSION)
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, *, wall_time: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=wall_time or time.time(), **content)
        with naming(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()

    def log(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=valid_text(in_group(name)), simple_value=value) for name, value in point.metrics.items()
        ]
        self._write(wall_time=point.time, step=point.step, summary=Summary(value=values))

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open(step)

    def flush(self) -> None:
        with naming(self._path):
            fsync_path(self._path)

    def close(self, status: str) -> None:
        with suppress(OSError):  # a full disk: reported when the point was logged
            self._file.close()

"""The readers of a run's log beside MLflow: event files for TensorBoard, a run of W&B.

Both have a mark: a file with the number of entries of the log that they have for certain. A start gives them the rest,
also what was logged while they were switched off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from dist_mem.runtime.environment import wandb_environment
from dist_mem.runtime.files import fsync_path, is_missing, make_folder, naming, read_regular, write_text
from dist_mem.tracking.log import COUNTED, Log, LogReader, Point, find_entries, select_counted
from dist_mem.tracking.names import in_group, valid_text
from dist_mem.tracking.tracker import Sink, end_in_time

MARK = "entries_read"  # file in the folder of a reader
TENSORBOARD = "tensorboard"  # folder in the run directory
WANDB_ID_FILE = "wandb_run_id"  # in the run directory
_EVENTS = "events.out.tfevents."  # + seconds; TensorBoard reads the files in the order of their names
_EVENT_VERSION = "brain.Event:2"  # of files whose marks are obeyed
_WANDB_PROJECT = "dist_mem"
_BATCH = 500  # entries


class UnreadPoints(NamedTuple):
    """What a reader lacks."""

    first: int  # step; whatever the reader has of it and of later ones counts no more
    points: list[Point]  # from there on


class Mark:
    """How many entries of the log a reader has."""

    def __init__(self, folder: Path, log: Log) -> None:
        self._path, self._log, self._num_read = folder / MARK, log, 0

    def read_unread(self, first_step: int) -> UnreadPoints:
        """Return what a reader lacks before it gets the points past `first_step`."""
        text = "" if is_missing(self._path) else read_regular(self._path).decode(errors="replace")
        self._num_read = int(text) if text.strip().isdecimal() else 0
        reader = LogReader(self._log.path, self._num_read, kinds=COUNTED)
        first = first_step + 1 if reader.num_done else 0
        while first and (entries := reader.batch(_BATCH)):
            steps = [entry.body["step"] for entry in entries if entry.kind in ("point", "repeat")]
            rewinds = [entry.body for entry in entries if entry.kind == "rewind"]
            first = min([first, *steps, *(body["step"] + (not body.get("surplus")) for body in rewinds)])
            reader.pass_batch()
        return UnreadPoints(first, select_counted(find_entries(self._log.path, *COUNTED, first=first)))

    def move(self) -> None:
        """Note that the reader has all points of the log."""
        self._num_read = self._log.num_entries

    def write(self) -> None:
        """Keep the mark, after what was read is on disk."""
        write_text(self._path, f"{self._num_read}\n")


class TensorBoardFiles(Sink):
    """Writes every point as one event, which is in the file when `log` returns: a kill loses none.

    Every start begins another file, with the step from which on TensorBoard discards older points.
    """

    def __init__(self, folder: Path, log: Log, *, first_step: int) -> None:
        """Begin a file for the points past `first_step`, the step the run continues from (0: a fresh start)."""
        self._folder = folder
        make_folder(folder)
        self._mark = Mark(folder, log)
        first, points = self._mark.read_unread(first_step)
        self._open(first)
        for point in points:
            self.log(point)
        self._mark.move()

    def _open(self, first: int) -> None:
        """Begin a file, which is the last by its name, also on a node whose clock is behind."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        times = [path.name.removeprefix(_EVENTS).partition(".")[0] for path in self._folder.glob(f"{_EVENTS}*")]
        second = max([int(time.time()), *(int(text) + 1 for text in times if text.isdecimal())])
        self._path = self._folder / f"{_EVENTS}{second:010}.dist_mem"
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version=_EVENT_VERSION)
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))

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
        self._mark.move()

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open(step + 1)
        self._mark.move()

    def flush(self) -> None:
        with naming(self._path):
            fsync_path(self._path)
        self._mark.write()

    def close(self, status: str) -> None:
        with suppress(OSError):  # a full disk: reported when the point was logged
            self._file.close()
            self.flush()


class WandbRun(Sink):
    """A run in RUN/wandb, written without a network; `wandb sync RUN/wandb/offline-run-*` sends it.

    Every start of a run directory writes one more folder there, all with the id in RUN/wandb_run_id: W&B shows one run.
    WANDB_MODE=online sends while the job runs, WANDB_MODE=disabled writes nothing. No error of the client stops a
    training. Every point is logged under its step. W&B has each step once: repeated steps keep their first values.

    Only the end of a job moves the mark: the client keeps points in memory, for how long it does not say, and a kill
    loses these. So a start after a kill sends all points of the killed job again.
    """

    def __init__(
        self, of_run: Mapping[str, Any], run_dir: Path, log: Log, *, first_step: int, report: Callable[[str], None]
    ) -> None:
        """Begin a run, or continue the one of the run directory, with the points that it lacks up to `first_step`.

        Args:
            of_run: project (None: WANDB_PROJECT), name and config for `wandb.init`. The config has interpolations in
                place of values from the environment, which may be secrets.
            report: shows a line to the user.
        """
        self._report, self._last_step = report, 0
        self._mark = Mark(run_dir / "wandb", log)
        self._run: Any = None  # wandb.Run; None: it cannot be used
        self._attempt(lambda: self._open(of_run, run_dir, first_step))

    def _open(self, of_run: Mapping[str, Any], run_dir: Path, first_step: int) -> None:
        mode = wandb_environment(project=_WANDB_PROJECT)
        if mode == "disabled":  # the mark stays, so that a later start sends what this one logs
            self._report("W&B: disabled by WANDB_MODE")
            return
        import wandb

        id_file = run_dir / WANDB_ID_FILE
        if is_missing(id_file):
            write_text(id_file, uuid4().hex[:8] + "\n")
        make_folder(run_dir / "wandb")
        hooks = sys.excepthook, sys.exit  # the client replaces both, to report errors that are ours to report
        options: dict[str, Any] = {
            **of_run,
            "id": read_regular(id_file).decode(errors="replace").strip(),
            "dir": str(run_dir),
            "mode": mode,
            "resume": "allow",
            "reinit": "create_new",  # a program may have a run of its own
        }
        quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_code": True, "disable_git": True}
        try:
            self._run = wandb.init(**options, settings=wandb.Settings(**quiet, x_disable_meta=True))
        finally:
            sys.excepthook, sys.exit = hooks
        self._last_step = self._run.starting_step  # online: W&B has the steps before it, and would warn of each
        self._report(f"W&B: run {self._run.id} in {run_dir / 'wandb'}, {mode}")
        for point in self._mark.read_unread(first_step).points:
            self.log(point)

    def log(self, point: Point) -> None:
        if self._run is None or point.step < self._last_step:
            return
        self._last_step = point.step
        values = {in_group(name): value for name, value in point.metrics.items()}
        self._attempt(lambda: self._run.log(values, step=point.step))

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "params" and self._run is not None:
            self._attempt(lambda: self._run.config.update(body["params"], allow_val_change=True))

    def close(self, status: str) -> None:
        if self._run is not None:
            if waited := end_in_time(lambda: self._attempt(lambda: self._finish(status))):  # no network: for ever
                problem = f"has not sent everything after {waited}"
                self._report(f"warning: W&B {problem}; the next start sends it, metrics.jsonl has every point")
            self._run = None

    def _finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)
        self._mark.move()
        self._mark.write()

    def _attempt(self, what: Callable[[], object]) -> None:
        """Call the client; after an error, report it once and do without the client."""
        try:
            what()
        except Exception as error:  # of any of the client's libraries
            self._run = None
            reason = str(error).partition("\n")[0]
            lost = "from here on W&B gets nothing of this job; metrics.jsonl has every point"
            self._report(f"warning: W&B: {type(error).__name__}: {reason}; {lost}")

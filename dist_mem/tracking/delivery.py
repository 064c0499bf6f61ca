"""From a journal to MLflow: what is sent when, and the background thread that keeps trying.

Nothing on this side says what MLflow has: that is a tag of the run, written after the entries it counts. Before they
are sent they are on the disk, so that no crash can leave MLflow ahead of the journal, and the journal's next lines
taken for sent. Whoever goes on with a journal, the resumed job or `dist-mem track sync`, reads the tag first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_mem.runtime.files import fsync_path
from dist_mem.tracking.branches import Branches
from dist_mem.tracking.journal import Entry, JournalReader
from dist_mem.tracking.mlflow_run import UID_TAG, MlflowRun, Target, is_refusal
from dist_mem.tracking.refusals import brief

SENT_TAG = "dist_mem.sent"  # how many entries of the journal MLflow has
SENT_FILES_TAG = "dist_mem.sent_files"  # likewise of files: their store may be down while MLflow is up
_FILES = ("artifact", "text")
_POINTS = ("point", "system")
_LARGEST_BATCH = 70  # entries; about one request of 900 metrics
_LONGEST_PAUSE = 10.0  # seconds between two attempts while MLflow is down


class Sender:
    """Sends the journal of a run, from where the run's tags say that MLflow has it."""

    def __init__(self, target: Target, journal: Path, *, report: Callable[[str], None]) -> None:
        """
        Args:
            report: takes a line for the user.
        """
        self.run = MlflowRun(target, report=report)
        self.num_sent = 0  # entries that MLflow had not
        self._uid = target.header.uid
        self._journal = journal
        self._report = report
        self._entries = self._files = JournalReader(journal)
        self.branches = Branches()
        self._is_open = False
        self._batch_size = _LARGEST_BATCH

    def send(self) -> None:
        """Send all that MLflow lacks. Raises what its client raises; called again, it goes on where it was."""
        if not self._is_open:
            self._open()
        while batch := self._entries.batch(self._batch_size):
            fsync_path(self._journal)
            if any(entry.kind == "superseded" for entry in batch):
                self._learn_branches()
            try:
                self._send_batch(batch, self.branches)
            except Exception:
                # Points that were taken, but answered too late, are slow to send again: MLflow looks each of them up
                # (8 ms in a run of 170,000). In one piece they would be too late for ever.
                self._batch_size = max(1, self._batch_size // 4)
                raise
            self._batch_size = min(_LARGEST_BATCH, self._batch_size + 2)
            self._entries.done()
            counts = {SENT_TAG: str(self._entries.num_done), SENT_FILES_TAG: str(self._files.num_done)}
            self.run.send_tags({**counts, UID_TAG: self._uid})  # all: a run of MLFLOW_RUN_ID may have another journal's
            self.num_sent += len(batch)
        while batch := self._files.batch(_LARGEST_BATCH):
            has_files = self._send_files(batch)
            self._files.done()
            if has_files:
                self.run.send_tags({SENT_FILES_TAG: str(self._files.num_done)})

    def send_whole(self, journal: Path) -> None:
        """Send another journal of the same run; no tag counts it, so all of it is sent, whatever MLflow has."""
        entries = JournalReader(journal)
        while batch := entries.batch(_LARGEST_BATCH):
            self._send_batch(batch, Branches())  # an evaluation is of its checkpoint, whatever came of that
            self._send_files(batch)
            entries.done()
            self.num_sent += len(batch)

    def _open(self) -> None:
        first = JournalReader(self._journal).batch(1)
        self.run.open(start_time=first[0].time if first else None)
        tags = self.run.tags if self.run.tags.get(UID_TAG) == self._uid else {}
        self._entries = JournalReader(self._journal, int(tags.get(SENT_TAG, 0)))
        self._files = JournalReader(self._journal, int(tags.get(SENT_FILES_TAG, 0)))
        self.branches = Branches()
        self._learn_branches(tags)
        self._is_open = True

    def _learn_branches(self, tags: Mapping[str, str] | None = None) -> None:
        """Note with the run what it has of before a rollback, before anything of after it is sent."""
        found = self.branches.learn(self._journal, self._entries.num_done, tags or {})
        for branch in found:
            self.run.send_tags(branch.tag())
            if branch.last_sent >= branch.first:
                self._report(f"MLflow can take nothing back: {next(iter(branch.tag().values()))}")
        self.branches.add(found)

    def _send_batch(self, batch: Sequence[Entry], branches: Branches) -> None:
        """All but files: the points, then the rest in order, so that a run is not FINISHED before its last point."""
        points = branches.points(entry for entry in batch if entry.kind in _POINTS)
        try:
            self.run.send_points(points)
        except Exception as error:
            self._stop_unless_refused(error)
            for entry in points:  # one of them is refused: take the others
                self._try(self.run.send_points, [entry], what=f"the figures of step {entry.body['step']}")
        for entry in batch:
            if entry.kind not in (*_POINTS, *_FILES, "superseded"):
                self._try(self.run.send, entry, what=entry.kind)

    def _send_files(self, batch: Sequence[Entry]) -> bool:
        """The files; returns whether there were any."""
        files = [entry for entry in batch if entry.kind in _FILES]
        for entry in files:
            self._try(self.run.send, entry, what=entry.body.get("path", entry.body.get("name")))
        return bool(files)

    def _try(self, send: Callable[[Any], None], argument: Any, *, what: str) -> None:
        """Send something, or say that it was refused for good."""
        try:
            send(argument)
        except Exception as error:
            self._stop_unless_refused(error)
            self._report(f"MLflow refused {what}: {brief(error)}")

    def _stop_unless_refused(self, error: Exception) -> None:
        """Raise the error unless it means that MLflow will never take this, although it has the run."""
        if is_refusal(error) and self.run.is_there():
            return
        self._is_open = not is_refusal(error)
        raise error


class Delivery:
    """A background thread that sends, waits a little, and sends again; nobody waits for it but `close`."""

    def __init__(
        self, send: Callable[[], object], *, report: Callable[[str], None], service: str, interval: float = 5.0
    ) -> None:
        """Start the thread.

        Args:
            send: sends all there is, and raises if it could not.
            report: takes a line for the user; called in the thread, once per outage.
            service: its name in messages.
            interval: seconds between two calls of `send`.
        """
        self._send = send
        self._report = report
        self._service = service
        self._interval = interval
        self._closing = threading.Event()
        self._is_down = False
        self._is_complete = False
        self._thread = threading.Thread(target=self._work, name=f"delivery to {service}", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Send what is left, for at most `seconds`; a service that is down gets one attempt.

        Returns:
            Whether everything was sent.
        """
        self._closing.set()
        self._thread.join(seconds)
        return self._is_complete

    def _work(self) -> None:
        pause = self._interval
        is_last = False
        while not is_last:
            is_last = self._closing.is_set()  # asked before sending: all that was written before `close` is sent
            try:
                self._send()
            except Exception as error:  # whatever a client library raises must not end the thread, nor training
                self._note_outage(error)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._note_success()
                pause = self._interval
                self._is_complete = is_last
            self._closing.wait(pause)

    def _note_outage(self, error: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            self._report(f"{self._service} cannot be used now ({brief(error)}); nothing waits for it, and all is kept")

    def _note_success(self) -> None:
        if self._is_down:
            self._is_down = False
            self._report(f"{self._service} works again, and has everything")

"""Send a journal to MLflow, in a background thread that keeps trying.

The number of sent entries is stored only in MLflow, in a tag of the run that is written after the entries it counts.
Entries are flushed to disk before they are sent, so that no crash can leave MLflow ahead of the journal, which would
make later entries count as sent. The next sender, a resumed job or `dist-mem track sync`, reads the tag first.
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

SENT_TAG = "dist_mem.sent"  # number of journal entries that MLflow has
SENT_FILES_TAG = "dist_mem.sent_files"  # the same for files, whose store may be down while MLflow is up
_FILES = ("artifact", "text")
_POINTS = ("point", "system")
_LARGEST_BATCH = 70  # entries; about one request of 900 metrics
_LONGEST_PAUSE = 10.0  # seconds between two attempts while MLflow is down


class Sender:
    """Sends the journal of a run, starting after the entries that MLflow already has, by the tags of the run."""

    def __init__(self, target: Target, journal: Path, *, report: Callable[[str], None]) -> None:
        """
        Args:
            report: called with a line for the user.
        """
        self.run = MlflowRun(target, report=report)
        self.num_sent = 0  # entries sent by this object
        self._uid = target.header.uid
        self._journal = journal
        self._report = report
        self._entries = self._files = JournalReader(journal)
        self.branches = Branches()
        self._is_open = False
        self._batch_size = _LARGEST_BATCH

    def send(self) -> None:
        """Send all entries that MLflow lacks. Raises the errors of its client; another call continues after them."""
        if not self._is_open:
            self._open()
        while batch := self._entries.batch(self._batch_size):
            fsync_path(self._journal)
            if any(entry.kind == "superseded" for entry in batch):
                self._learn_branches()
            try:
                self._send_batch(batch, self.branches)
            except Exception:
                # Points that MLflow stored, but acknowledged too late, are slow to send again: it looks each of them up
                # (8 ms in a run of 170,000). One large batch would time out every time.
                self._batch_size = max(1, self._batch_size // 4)
                raise
            self._batch_size = min(_LARGEST_BATCH, self._batch_size + 2)
            self._entries.done()
            counts = {SENT_TAG: str(self._entries.num_done), SENT_FILES_TAG: str(self._files.num_done)}
            self.run.send_tags({**counts, UID_TAG: self._uid})  # all: the run may have tags of another journal
            self.num_sent += len(batch)
        while batch := self._files.batch(_LARGEST_BATCH):
            has_files = self._send_files(batch)
            self._files.done()
            if has_files:
                self.run.send_tags({SENT_FILES_TAG: str(self._files.num_done)})

    def send_whole(self, journal: Path) -> None:
        """Send another journal of the same run. No tag counts its entries, so all of them are sent."""
        entries = JournalReader(journal)
        while batch := entries.batch(_LARGEST_BATCH):
            self._send_batch(batch, Branches())  # an evaluation belongs to its checkpoint, also after a rollback
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
        """Tag the run with its new branches before any of their points is sent."""
        found = self.branches.learn(self._journal, self._entries.num_done, tags or {})
        for branch in found:
            self.run.send_tags(branch.tag())
            if branch.last_sent >= branch.first:
                self._report(f"MLflow cannot delete points: {next(iter(branch.tag().values()))}")
        self.branches.add(found)

    def _send_batch(self, batch: Sequence[Entry], branches: Branches) -> None:
        """Send all but files: first the points, then the rest in order, so that FINISHED follows the last point."""
        points = branches.points(entry for entry in batch if entry.kind in _POINTS)
        try:
            self.run.send_points(points)
        except Exception as error:
            self._stop_unless_refused(error)
            for entry in points:  # one of them is refused: send the others
                self._try(self.run.send_points, [entry], name=f"the figures of step {entry.body['step']}")
        for entry in batch:
            if entry.kind not in (*_POINTS, *_FILES, "superseded"):
                self._try(self.run.send, entry, name=entry.kind)

    def _send_files(self, batch: Sequence[Entry]) -> bool:
        """Send the files; return whether there were any."""
        files = [entry for entry in batch if entry.kind in _FILES]
        for entry in files:
            self._try(self.run.send, entry, name=entry.body.get("path", entry.body.get("name")))
        return bool(files)

    def _try(self, send: Callable[[Any], None], argument: Any, *, name: str) -> None:
        """Send `argument`, or report that MLflow refuses it for good."""
        try:
            send(argument)
        except Exception as error:
            self._stop_unless_refused(error)
            self._report(f"MLflow refused {name}: {brief(error)}")

    def _stop_unless_refused(self, error: Exception) -> None:
        """Raise the error, unless MLflow has the run and refuses this entry for good."""
        if is_refusal(error) and self.run.is_there():
            return
        self._is_open = not is_refusal(error)
        raise error


class Delivery:
    """A background thread that sends at intervals; only `close` waits for it."""

    def __init__(
        self, send: Callable[[], object], *, report: Callable[[str], None], service: str, interval: float = 5.0
    ) -> None:
        """Start the thread.

        Args:
            send: sends all entries, and raises if it cannot.
            report: called with a line for the user, in the thread, once per outage.
            service: name of the service in messages.
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
        """Send the remaining entries, for at most `seconds`; a service that is down gets one attempt.

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
            is_last = self._closing.is_set()  # read before sending: all that was written before `close` is sent
            try:
                self._send()
            except Exception as error:  # no error of a client library may end the thread or the training
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
            self._report(
                f"{self._service} cannot be used now ({brief(error)}); nothing waits for it, all data are kept"
            )

    def _note_success(self) -> None:
        if self._is_down:
            self._is_down = False
            self._report(f"{self._service} works again, and has everything")

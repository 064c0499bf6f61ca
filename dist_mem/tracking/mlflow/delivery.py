"""Send a journal to MLflow, in a background thread that keeps trying.

The number of sent entries is stored only in MLflow, in a tag of the run that is written after the entries it counts.
Entries are flushed to disk before they are sent, so that no crash can leave MLflow ahead of the journal, which would
make later entries count as sent. The next sender, a resumed job or `dist-mem track sync`, reads the tag first.

MLflow cannot delete points, and draws two points of one step as a zigzag. So points that it has from before a rollback
stay, and the points that replace them are sent under other names: `branch_2/train/loss` for steps 41 to 60, then
`train/loss` again from step 61 on. Every name has every step once. Points superseded before they were sent are never
sent.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.runtime.files import fsync_path
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.mlflow.errors import brief, is_refusal
from dist_mem.tracking.mlflow.journal import Entry, JournalReader, find_entries, is_superseded, read_entries
from dist_mem.tracking.mlflow.run import UID_TAG, MlflowRun, Target

SENT_TAG = "dist_mem.sent"  # number of journal entries that MLflow has
SENT_FILES_TAG = "dist_mem.sent_files"  # the same for files, whose store may be down while MLflow is up
BRANCH_TAG = "dist_mem.branch_"  # + number; branch 1 is the run as it began
_FILES = ("artifact", "text")
_POINTS = ("point", "system")
_LARGEST_BATCH = 70  # entries; about one request of 900 metrics
_LONGEST_PAUSE = 10.0  # seconds between two attempts while MLflow is down


class Branch(NamedTuple):
    """The points by which a job replaces points that were logged before."""

    number: int
    record: Entry  # the "superseded" entry of the journal
    last_sent: int  # last superseded step that MLflow has; smaller than `first` if it has none

    @property
    def first(self) -> int:
        """The first step that differs."""
        return int(self.record.body["first"])

    @property
    def description(self) -> str:
        """The text of the run's tag for this branch, for users and for `read_last_sent`."""
        made = datetime.fromtimestamp(self.record.body["before"] / 1000, UTC).isoformat(timespec="milliseconds")
        if self.last_sent < self.first:
            return f"steps {self.first} to {self.record.body['last']} made again from {made} on, before they were sent"
        return (
            f"steps {self.first} to {self.last_sent} logged before {made} count no more; those that do have "
            f"names that begin with branch_{self.number}/"
        )


def read_last_sent(description: str) -> int:
    """Return `last_sent` of a branch from its tag; -1 if none of its superseded points was sent."""
    found = re.match(r"steps \d+ to (\d+) logged before", description)
    return int(found[1]) if found else -1


def find_branches(
    journal: Path, known: Sequence[Branch], *, num_sent: int, tags: Mapping[str, str]
) -> Sequence[Branch]:
    """Return the branches of a journal after the known ones; tag the run with them before sending their points.

    Args:
        num_sent: number of entries that MLflow has.
        tags: of the run; a tag of a branch was written before the branch's first point was sent.
    """
    branches = [*known]
    for number, record in enumerate(find_entries(journal, "superseded")[len(known) :], start=2 + len(known)):
        description = tags.get(f"{BRANCH_TAG}{number}")
        if description is None:
            last_sent = _last_sent(journal, record, num_sent, branches)
        else:
            last_sent = read_last_sent(description)
        branches.append(Branch(number, record, last_sent))
    return branches[len(known) :]


def _last_sent(journal: Path, record: Entry, num_sent: int, older: Sequence[Branch]) -> int:
    """Return the last step of the points from before a branch that MLflow has."""
    records = [branch.record for branch in older]
    sent = [
        entry.body["step"]
        for _, entry in zip(range(num_sent), read_entries(journal), strict=False)
        if entry.kind == "point" and entry.time < record.body["before"] and not is_superseded(entry, records)
    ]
    return max([record.body["first"] - 1, *sent, *(branch.last_sent for branch in older)])


def points_to_send(entries: Iterable[Entry], branches: Sequence[Branch]) -> list[Entry]:
    """Return the entries that are not superseded, with their metrics under the names that MLflow gets."""
    records = [branch.record for branch in branches]
    return [_renamed(entry, branches) for entry in entries if not is_superseded(entry, records)]


def _renamed(entry: Entry, branches: Sequence[Branch]) -> Entry:
    if entry.kind != "point":
        return entry
    made_by = [branch for branch in branches if branch.record.body["before"] <= entry.time]
    is_other = bool(made_by) and made_by[-1].first <= entry.body["step"] <= made_by[-1].last_sent
    prefix = f"branch_{made_by[-1].number}/" if is_other else ""
    metrics = {prefix + in_group(name): value for name, value in entry.body["metrics"].items()}
    return entry._replace(body={**entry.body, "metrics": metrics})


class Sender:
    """Sends the journal of a run, starting after the entries that MLflow already has, by the tags of the run."""

    def __init__(self, target: Target, journal: Path, *, report: Callable[[str], None]) -> None:
        """
        Args:
            report: called with a line for the user.
        """
        self.run = MlflowRun(target, report=report)
        self.num_sent = 0  # entries sent by this object
        self.branches: list[Branch] = []  # that were found so far
        self._uid = target.header.uid
        self._journal = journal
        self._report = report
        self._entries = self._files = JournalReader(journal)
        self._is_open = False
        self._batch_size = _LARGEST_BATCH

    def send(self) -> None:
        """Send all entries that MLflow lacks. Raises the errors of its client; another call continues after them."""
        if not self._is_open:
            self._open()
        while batch := self._entries.batch(self._batch_size):
            fsync_path(self._journal)
            if any(entry.kind == "superseded" for entry in batch):
                self._learn_branches({})
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
            self._send_batch(batch, branches=[])  # an evaluation belongs to its checkpoint, also after a rollback
            self._send_files(batch)
            entries.done()
            self.num_sent += len(batch)

    def _open(self) -> None:
        first = JournalReader(self._journal).batch(1)
        self.run.open(start_time=first[0].time if first else None)
        tags = self.run.tags if self.run.tags.get(UID_TAG) == self._uid else {}
        self._entries = JournalReader(self._journal, int(tags.get(SENT_TAG, 0)))
        self._files = JournalReader(self._journal, int(tags.get(SENT_FILES_TAG, 0)))
        self.branches = []
        self._learn_branches(tags)
        self._is_open = True

    def _learn_branches(self, tags: Mapping[str, str]) -> None:
        """Tag the run with its new branches before any of their points is sent."""
        found = find_branches(self._journal, self.branches, num_sent=self._entries.num_done, tags=tags)
        for branch in found:
            self.run.send_tags({f"{BRANCH_TAG}{branch.number}": branch.description})
            if branch.last_sent >= branch.first:
                self._report(f"MLflow cannot delete points: {branch.description}")
        self.branches += found

    def _send_batch(self, batch: Sequence[Entry], branches: Sequence[Branch]) -> None:
        """Send all but files: first the points, then the rest in order, so that FINISHED follows the last point."""
        entries = (entry for entry in batch if entry.kind in _POINTS)
        try:
            self.run.send_points(points_to_send(entries, branches))
        except Exception as error:
            self._is_open = not is_refusal(error)  # of the whole run, which is gone
            raise
        for entry in batch:
            if entry.kind == "checkpoint":
                entry = self._checkpoint_to_send(entry, branches)
            if entry.kind not in (*_POINTS, *_FILES, "superseded"):
                self._try(self.run.send, entry, name=entry.kind)

    def _checkpoint_to_send(self, entry: Entry, branches: Sequence[Branch]) -> Entry:
        """Return the entry of a checkpoint with its points as the run has them."""
        points = [Entry(*point) for point in entry.body["points"]]
        points = points_to_send(points, branches)
        return entry._replace(body={**entry.body, "points": points})

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
        pause, is_down, is_last = self._interval, False, False
        while not is_last:
            is_last = self._closing.is_set()  # read before sending: all that was written before `close` is sent
            try:
                self._send()
            except Exception as error:  # no error of a client library may end the thread or the training
                if not is_down:
                    reason = f"{self._service} cannot be used now ({brief(error)})"
                    self._report(f"{reason}; nothing waits for it, all data are kept")
                is_down, pause = True, min(2 * pause, _LONGEST_PAUSE)
            else:
                if is_down:
                    self._report(f"{self._service} works again, and has everything")
                is_down, pause = False, self._interval
                self._is_complete = is_last
            self._closing.wait(pause)

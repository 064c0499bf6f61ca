"""Send the log of a run to MLflow, in a background thread that keeps trying.

The number of sent entries is stored only in MLflow, in a tag of the run that is written after the entries it counts.
Entries are flushed to disk before they are sent, so that no crash can leave MLflow ahead of the log, which would make
later entries count as sent. The next sender, a resumed job or `dist-mem track sync`, reads the tag first.

MLflow cannot delete points, and draws two points of one step as a zigzag. So points that it has from before a rollback
stay, and those that replace them, say of steps 41 to 60, go to a nested run; the points from step 61 on go to the run
itself, as its status and everything else does. In each run every name has every step once. Points superseded before
they were sent are never sent. MLflow is asked which of them it has: nothing else knows it after a kill.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import TrackingConfig
from dist_mem.errors import TakenOverError
from dist_mem.runtime.addresses import login_of
from dist_mem.runtime.files import fsync_path
from dist_mem.tracking.log import EMPTIED, Entry, Log, LogReader, find_entries, is_superseded, read_entries
from dist_mem.tracking.mlflow.client import client_tags, first_line, is_refusal, remedy_for
from dist_mem.tracking.mlflow.run import MlflowRun, Target, target_of
from dist_mem.tracking.mlflow.store import read_run_id, sync_command
from dist_mem.tracking.names import in_group
from dist_mem.tracking.provenance import without_credentials
from dist_mem.tracking.tracker import Sink

FLUSH_SECONDS = 6.0  # longest wait of `close` for MLflow; with the preflight, a dead server costs less than 10
SENT_TAG = "dist_mem.sent"  # number of entries that MLflow has
SENT_FILES_TAG = "dist_mem.sent_files"  # the same for files, whose store may be down while MLflow is up
_FILES = ("artifact", "text")
_POINTS = ("point", "system")
_NOT_SENT = ("rewind", "repeat", "branch", EMPTIED)  # kinds
_LARGEST_BATCH = 70  # entries; about one request of 900 metrics
_LONGEST_PAUSE = 10.0  # seconds between two attempts while MLflow is down


class NestedRun(NamedTuple):
    """The run of the points that replace those which MLflow has from before a rollback."""

    branch: Entry  # of the log
    last: int  # last step that MLflow has from before
    run_id: str

    def has(self, step: int, time: int) -> bool:
        """Whether a point of this step, logged at this time in milliseconds, belongs here."""
        return self.branch.body["first"] <= step <= self.last and self.branch.body["before"] <= time


def names_of_all_steps(steps: Mapping[tuple[str, ...], set[int]]) -> dict[str, set[int]]:
    """Return names of metrics whose steps are those of all points: name -> steps.

    All metrics of a point are sent together, so of names that are in the same points one is enough.

    Args:
        steps: of the points, by the names of their metrics; of a long run, the values too would take gigabytes.
    """
    kinds: dict[str, set[tuple[str, ...]]] = defaultdict(set)  # of points that have a name
    for names in steps:
        for name in names:
            kinds[in_group(name)].add(names)
    enough = {frozenset(having): name for name, having in kinds.items()}
    return {name: set[int]().union(*(steps[names] for names in having)) for having, name in enough.items()}


class Sender:
    """Sends the log of a run, starting after the entries that MLflow already has, by the tags of the run."""

    def __init__(self, target: Target, log: Path, *, report: Callable[[str], None]) -> None:
        """
        Args:
            report: called with a line for the user.
        """
        self.run = MlflowRun(target, report=report)
        self.num_sent = 0  # entries sent by this object
        self.refused: list[str] = []  # what was reported of entries that MLflow has refused for good
        self._log = log
        self._report = report
        self._entries = self._files = LogReader(log)
        self._branches: list[Entry] = []  # of the log, that were found so far
        self._nested: list[NestedRun] = []
        self._is_open = False
        self._batch_size = _LARGEST_BATCH

    def send(self) -> None:
        """Send all entries that MLflow lacks. Raises the errors of its client; another call continues after them."""
        try:
            self._send_rest()
        except Exception as error:
            self._is_open = self._is_open and not is_refusal(error)  # of the whole run, which is gone
            raise

    def _send_rest(self) -> None:
        if not self._is_open:
            self._open()
        while batch := self._entries.batch(self._batch_size):
            fsync_path(self._log)
            if any(entry.kind == "branch" for entry in batch):
                self._find_branches()
            try:
                self._send_batch([entry for entry in batch if not is_superseded(entry, self._branches)])
            except Exception:
                # Points that MLflow stored, but acknowledged too late, are slow to send again: it looks each of them up
                # (8 ms in a run of 170,000). One large batch would time out every time.
                self._batch_size = max(1, self._batch_size // 4)
                raise
            self._batch_size = min(_LARGEST_BATCH, self._batch_size + 2)
            self._entries.pass_batch()
            counts = {SENT_TAG: str(self._entries.num_done), SENT_FILES_TAG: str(self._files.num_done)}
            self.run.send_tags(counts)
            self.num_sent += len(batch)
        while batch := self._files.batch(_LARGEST_BATCH):
            self._send_files(batch)
            self._files.pass_batch()
            self.run.send_tags({SENT_FILES_TAG: str(self._files.num_done)})
        self._files.pass_batch()  # what follows the last file

    def send_whole(self, path: Path) -> None:
        """Send the file of an evaluation of the same run. No tag counts its entries, so all of them are sent."""
        entries = LogReader(path)
        while batch := entries.batch(_LARGEST_BATCH):
            self._send_batch(batch)
            self._send_files(batch)
            entries.pass_batch()
            self.num_sent += len(batch)

    def gaps(self) -> Iterator[tuple[str, set[int]]]:
        """Yield the points that MLflow lacks although they were sent: name, steps. Raises any error of its client."""
        by_run: dict[str, dict[tuple[str, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
        for entry in islice(read_entries(self._log), self._entries.num_done):  # a job may be adding others
            if entry.kind == "point" and not is_superseded(entry, self._branches):
                by_run[self._run_of(entry)][tuple(entry.body["metrics"])].add(entry.body["step"])
        for run_id, logged in by_run.items():
            for name, steps in names_of_all_steps(logged).items():
                if absent := steps - {metric.step for metric in self.run.history(name, run_id)}:
                    yield name, absent

    def _open(self) -> None:
        first = LogReader(self._log).batch(1)
        self.run.open(start_time=first[0].time if first else None)
        tags = self.run.tags
        self._entries = LogReader(self._log, int(tags.get(SENT_TAG, 0)))
        self._files = LogReader(self._log, int(tags.get(SENT_FILES_TAG, 0)), kinds=_FILES)
        self._branches, self._nested = [], []
        self._find_branches()
        self._is_open = True

    def _find_branches(self) -> None:
        """Find the branches of the log, and nest runs for those whose steps MLflow has already."""
        branches = find_entries(self._log, "branch")[len(self._branches) :]
        for branch in branches:
            first, before = branch.body["first"], branch.body["before"]
            steps: dict[tuple[str, ...], set[int]] = defaultdict(set)
            for entry in find_entries(self._log, "point", first=first):
                if is_superseded(entry, [branch]):
                    steps[tuple(entry.body["metrics"])].add(entry.body["step"])
            names = names_of_all_steps(steps)
            sent = [metric.step for name in names for metric in self.run.history(name) if metric.timestamp < before]
            if (last := max(sent, default=-1)) >= first:
                run_id = self.run.nest(2 + len(self._branches), first=first, last=last, before=before)
                self._nested.append(NestedRun(branch, last, run_id))
            self._branches.append(branch)  # last: after an error it is looked for again

    def _run_of(self, entry: Entry) -> str:
        """Return the id of the run to which a point or a checkpoint belongs."""
        step = entry.body["step"]
        nested = [run.run_id for run in self._nested if entry.kind != "system" and run.has(step, entry.time)]
        return nested[-1] if nested else str(self.run.run_id)

    def _send_batch(self, batch: Sequence[Entry]) -> None:
        """Send all but files: first the points, then the rest in order, so that FINISHED follows the last point."""
        by_run: dict[str, list[Entry]] = defaultdict(list)
        for entry in batch:
            if entry.kind in _POINTS:
                by_run[self._run_of(entry)].append(entry)
        for run_id, points in by_run.items():
            self.run.send_points(points, run_id)
        for entry in batch:
            if entry.kind == "checkpoint":
                self._try(self._send_checkpoint, entry, name=entry.kind)
            elif entry.kind not in (*_POINTS, *_FILES, *_NOT_SENT):
                self._try(self.run.send, entry, name=entry.kind)

    def _send_checkpoint(self, entry: Entry) -> None:
        points = [point for body in entry.body["points"] if not is_superseded(point := Entry(*body), self._branches)]
        self.run.send_checkpoint(entry, points, self._run_of(entry))

    def _send_files(self, batch: Sequence[Entry]) -> None:
        """Send the files of a batch."""
        for entry in batch:
            if entry.kind in _FILES:
                self._try(self.run.send, entry, name=entry.body.get("path", entry.body.get("name")))

    def _try(self, send: Callable[[Entry], None], entry: Entry, *, name: str) -> None:
        """Send an entry, or report that MLflow refuses it for good."""
        try:
            send(entry)
        except Exception as error:
            if not (is_refusal(error) and self.run.takes_entries()):
                raise
            self.refused.append(f"MLflow refused {name}: {first_line(error)}")
            self._report(self.refused[-1])


class Delivery:
    """A background thread that sends at intervals; only `close` waits for it."""

    def __init__(
        self, send: Callable[[], object], *, report: Callable[[str], None], service: str, interval: float = 5.0
    ) -> None:
        """Start the thread.

        Args:
            send: sends all entries, and raises if it cannot.
            report: called with a line for the user, in the thread, once per outage; again where access is refused too.
            service: name of the service in messages.
            interval: seconds between two calls of `send`.
        """
        self._send = send
        self._report = report
        self._service = service
        self._interval = interval
        self.error: Exception | None = None  # of the last attempt
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
        pause, is_last = self._interval, False
        reported: set[str | None] = set()  # of this outage: None, or what the user can set
        while not is_last:
            is_last = self._closing.is_set()  # read before sending: all that was written before `close` is sent
            try:
                self._send()
            except Exception as error:  # no error of a client library may end the thread or the training
                self.error = error
                if (refusal := remedy_for(error)) not in reported:
                    reason = f"{self._service} cannot be used now ({first_line(error)})"
                    self._report(f"{reason}; nothing waits for it, all data are kept")
                reported.add(refusal)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self.error = None
                if reported:
                    self._report(f"{self._service} works again, and has everything")
                    reported.clear()
                pause = self._interval
                self._is_complete = is_last
            self._closing.wait(pause)


def hide_credentials(report: Callable[[str], None], uri: str) -> Callable[[str], None]:
    """Wrap `report` to remove the user, password and query of a URI, which would end up in log files."""
    scheme, _, rest = uri.partition("://")
    login, shown = login_of(scheme, rest), without_credentials(uri)
    return lambda text: report(text.replace(uri, shown).replace(login, "") if login else text.replace(uri, shown))


class MlflowReader(Sink):
    """Sends the log of a running job in a thread, so that a dead server blocks nothing."""

    def __init__(
        self, tracking: TrackingConfig, run_dir: Path, log: Log, *, sends: bool, report: Callable[[str], None]
    ) -> None:
        """
        Args:
            sends: import mlflow and start the thread, which also finds or creates the run.
            report: called with a line for the user, also from threads.
        """
        target = target_of(tracking, run_dir, log.header)
        self._log, self._target, self._report = log, target, hide_credentials(report, target.uri)
        self._known_run_id = read_run_id(run_dir)
        self._sync = sync_command(tracking, run_dir)
        self._is_closed = False
        self._sender: Sender | None = None
        if sends:
            log.record("tags", client_tags())
            self._sender = Sender(target, log.path, report=self._notify)
            self._delivery = Delivery(self._send, report=self._notify, service=f"MLflow at {target.uri}")

    @property
    def run_id(self) -> str | None:
        return self._known_run_id if self._sender is None else self._sender.run.run_id

    def close(self, status: str) -> None:
        try:
            self._log.guard()
        except TakenOverError:  # the other job reports and sends the rest
            self._is_closed = True
            return
        if self._sender is None:
            self._notify(f"MLflow has received nothing of this job yet; send it with: {self._sync}")
        elif not self._delivery.close(FLUSH_SECONDS):
            self._notify(
                f"MLflow at {self._target.uri} has not received everything yet; resuming the run sends the rest, and "
                f"so does: {self._sync}"
            )
        else:
            self._notify(f"MLflow: {self._sender.run.where}")
        self._is_closed = True

    def _send(self) -> None:
        try:
            self._log.guard()
        except TakenOverError:  # ends the training at its next write
            return
        assert self._sender is not None, "the thread starts after it"
        self._sender.send()

    def _notify(self, text: str) -> None:
        """Report a line to the user, unless the sink is closed: a thread may still wait for MLflow then."""
        if not self._is_closed:
            self._report(text)

"""Name the metrics that replace points MLflow already has from before a rollback.

MLflow cannot delete points, and draws two points of one step as a zigzag. So points that it has stay, and the points
that replace them are sent under other names: `branch_2/loss` for steps 41 to 60, then `loss` again from step 61 on.
Every name has every step once. Points superseded before they were sent are never sent, and need no branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dist_mem.tracking.journal import Entry, find_entries, is_superseded, read_entries

BRANCH_TAG = "dist_mem.branch_"  # + number; branch 1 is the run as it began


class Branch(NamedTuple):
    """The points by which a job replaces points that were logged before."""

    number: int
    record: Entry  # the "superseded" entry of the journal
    last_sent: int  # last superseded step that MLflow has; smaller than `first` if it has none

    @property
    def first(self) -> int:
        """The first step that differs."""
        return int(self.record.body["first"])

    def tag(self) -> dict[str, str]:
        """Return the tag of the MLflow run that describes the branch, for users and for the next sender."""
        made = datetime.fromtimestamp(self.record.body["before"] / 1000, UTC).isoformat(timespec="milliseconds")
        text = f"steps {self.first} to {self.record.body['last']} made again from {made} on, before they were sent"
        if self.last_sent >= self.first:
            text = (
                f"steps {self.first} to {self.last_sent} logged before {made} count no more; those that do are "
                f"branch_{self.number}/loss and so on"
            )
        return {f"{BRANCH_TAG}{self.number}": text}


class Branches:
    """The branches of a run that the sender of its journal has found so far."""

    def __init__(self) -> None:
        self._known: list[Branch] = []

    def learn(self, journal: Path, num_sent: int, tags: Mapping[str, str]) -> list[Branch]:
        """Return the branches of a journal that are not known yet; tag the run with them before calling `add`.

        Args:
            num_sent: number of entries that MLflow has.
            tags: of the run; a tag of a branch was written before the branch's first point was sent.
        """
        new: list[Branch] = []
        for number, record in enumerate(find_entries(journal, "superseded"), start=2):
            if number >= 2 + len(self._known):
                older = [*self._known, *new]
                text = tags.get(f"{BRANCH_TAG}{number}")
                last_sent = _last_sent(journal, record, num_sent, older) if text is None else _read_last_sent(text)
                new.append(Branch(number, record, last_sent))
        return new

    def add(self, branches: Iterable[Branch]) -> None:
        """Add branches to the known ones."""
        self._known += branches

    def points(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries to send, with their metrics renamed where they belong to a branch."""
        records = [branch.record for branch in self._known]
        return [self._named(entry) for entry in entries if not is_superseded(entry, records)]

    def _named(self, entry: Entry) -> Entry:
        if entry.kind != "point":
            return entry
        made_by = [branch for branch in self._known if branch.record.body["before"] <= entry.time]
        if not made_by or not made_by[-1].first <= entry.body["step"] <= made_by[-1].last_sent:
            return entry
        prefix = f"branch_{made_by[-1].number}/"
        metrics = {f"{prefix}{name}": value for name, value in entry.body["metrics"].items()}
        return entry._replace(body={**entry.body, "metrics": metrics})


def _last_sent(journal: Path, record: Entry, num_sent: int, older: Sequence[Branch]) -> int:
    """Return the last step of the points from before a branch that MLflow has."""
    records = [branch.record for branch in older]
    first = record.body["first"]
    sent = [
        entry.body["step"]
        for _, entry in zip(range(num_sent), read_entries(journal), strict=False)
        if entry.kind == "point" and entry.time < record.body["before"] and not is_superseded(entry, records)
    ]
    return max([first - 1, *sent, *(branch.last_sent for branch in older)])


def _read_last_sent(text: str) -> int:
    found = re.match(r"steps \d+ to (\d+) logged before", text)
    return int(found[1]) if found else -1

"""Under which names MLflow gets the steps of a run that it has already, with other values, from before a rollback.

MLflow can take no point back, and draws two points of one step as a zigzag. So the steps that it has keep their points,
and those that count instead stand beside them, complete: `branch_2/loss` for steps 41 to 60, and `loss` again from 61
on. Every name has every step once. What was not sent yet when it was superseded is never sent, and needs no branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dist_mem.tracking.journal import Entry, find_entries, is_superseded, read_entries

BRANCH_TAG = "dist_mem.branch_"  # + number; the first branch is the run as it began


class Branch(NamedTuple):
    """What a job made again, in place of what had been logged before it."""

    number: int
    record: Entry  # "superseded", in the journal
    last_sent: int  # of the steps that MLflow has from before; smaller than the first one of them if it has none

    @property
    def first(self) -> int:
        """The first step that differs."""
        return int(self.record.body["first"])

    def tag(self) -> dict[str, str]:
        """What stands with the run: for its users, and for the next one who sends."""
        made = datetime.fromtimestamp(self.record.body["before"] / 1000, UTC).isoformat(timespec="milliseconds")
        text = f"steps {self.first} to {self.record.body['last']} made again from {made} on, before they were sent"
        if self.last_sent >= self.first:
            text = (
                f"steps {self.first} to {self.last_sent} logged before {made} count no more; those that do are "
                f"branch_{self.number}/loss and so on"
            )
        return {f"{BRANCH_TAG}{self.number}": text}


class Branches:
    """The branches of a run, as far as whoever sends its journal has met them."""

    def __init__(self) -> None:
        self._known: list[Branch] = []

    def learn(self, journal: Path, num_sent: int, tags: Mapping[str, str]) -> list[Branch]:
        """The branches that are new in a journal, to be noted with the run before they are `added`.

        Args:
            num_sent: entries that MLflow has.
            tags: of the run; what is said there of a branch was true when its first point was sent.
        """
        new: list[Branch] = []
        for number, record in enumerate(find_entries(journal, "superseded"), start=2):
            if number >= 2 + len(self._known):
                older = [*self._known, *new]
                said = tags.get(f"{BRANCH_TAG}{number}")
                last_sent = _last_sent(journal, record, num_sent, older) if said is None else _read_last_sent(said)
                new.append(Branch(number, record, last_sent))
        return new

    def add(self, branches: Iterable[Branch]) -> None:
        """Go on with these too."""
        self._known += branches

    def points(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries that are to be sent, under the names that MLflow shall have for them."""
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
    """The last step that MLflow has from before a branch."""
    records = [branch.record for branch in older]
    first = record.body["first"]
    sent = [
        entry.body["step"]
        for _, entry in zip(range(num_sent), read_entries(journal), strict=False)
        if entry.kind == "point" and entry.time < record.body["before"] and not is_superseded(entry, records)
    ]
    return max([first - 1, *sent, *(branch.last_sent for branch in older)])


def _read_last_sent(said: str) -> int:
    found = re.match(r"steps \d+ to (\d+) logged before", said)
    return int(found[1]) if found else -1

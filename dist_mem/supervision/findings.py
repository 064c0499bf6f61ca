"""Findings of the checks and their format: one line per finding, with equal findings of several nodes merged.

FAIL     open files      node2           64 may be open, ranks need 208 -> raise the limit: ulimit -n 4096
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.terminal import some

OK, WARNING, FAIL = "ok", "warning", "FAIL"
RENDEZVOUS = "rendezvous"  # findings about ranks that do not join
MACHINE = "machine"  # a fault of the machine, found while something else was checked
_PASSING = (
    *(RENDEZVOUS, MACHINE, "accelerator", "disk room", "inodes", "time left", "connections", "all-reduce"),
    "run directory",
)
_NAMED = 4  # most places in a line: a report of 60 nodes must stay readable
_SHOWN = 12  # most lines in the message of a refused start


class Place(NamedTuple):
    """The node, and optionally the rank, where something was found."""

    node: str
    rank: int | None = None  # None: the whole node

    def __str__(self) -> str:
        return self.node if self.rank is None else f"{self.node} rank {self.rank}"


class Remark(NamedTuple):
    """One finding of a check, without its place."""

    level: str  # OK, WARNING or FAIL
    what: str  # the subject of the check, in two words
    found: str
    fix: str = ""
    blames_node: bool = False  # a start without this node may succeed

    def at(self, place: Place | None) -> Finding:
        """Return the finding at its place; None: the whole job."""
        return Finding(place, *self)


class Finding(NamedTuple):
    """A `Remark` with its place."""

    place: Place | None
    level: str
    what: str
    found: str
    fix: str
    blames_node: bool


def ok(what: str, found: str) -> Remark:
    """Return a remark of level OK."""
    return Remark(OK, what, found)


def warning(what: str, found: str, fix: str) -> Remark:
    """Return a remark of level WARNING: training works, but not as well, or not for long."""
    return Remark(WARNING, what, found, fix)


def fail(what: str, found: str, fix: str, *, blames_node: bool = False) -> Remark:
    """Return a remark of level FAIL: training would break, now or later, or be wrong."""
    return Remark(FAIL, what, found, fix, blames_node)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, with equal findings of several places merged, in the order of the checks."""
    merged: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.what,) if finding.level == OK else (finding.what, finding.found, finding.fix)
        merged.setdefault((finding.level, *key), []).append(finding)
    return [_line(alike) for alike in merged.values()]


def _line(alike: Sequence[Finding]) -> str:
    first = alike[0]
    others = {finding.found for finding in alike[1:]} - {first.found}
    found = f"{first.found}; others alike" if others else first.found
    places = [finding.place for finding in alike]
    if first.level == OK:
        places = [place and Place(place.node) for place in places]
    where = _name_places(places)
    text = f"{first.level:<8} {first.what:<16} {where:<20} {found}"
    return f"{text} -> {first.fix}" if first.fix else text


def _name_places(places: Iterable[Place | None]) -> str:
    return some(dict.fromkeys("all ranks" if place is None else str(place) for place in places), _NAMED)


def find_failures(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that prevent a job from training."""
    return [finding for finding in findings if finding.level == FAIL]


def failed_nodes(findings: Iterable[Finding], nodes: Iterable[str]) -> list[str]:
    """Return the nodes to leave out of the next start; empty if all nodes failed, since none would be left."""
    blamed = {finding.place.node for finding in find_failures(findings) if finding.blames_node and finding.place}
    return sorted(blamed) if set(nodes) - blamed else []


def may_pass(findings: Sequence[Finding], nodes: Iterable[str]) -> bool:
    """Return whether an unchanged restart may succeed: all failures are temporary or concern only some nodes."""
    of_nodes = bool(failed_nodes(findings, nodes))
    return all((finding.blames_node and of_nodes) or finding.what in _PASSING for finding in find_failures(findings))


def refuse(findings: Sequence[Finding], nodes: Iterable[str]) -> None:
    """Raise an error if any finding prevents a job from training.

    Args:
        nodes: of all ranks.

    Raises:
        UnfitError: all failures concern only some nodes, or are temporary.
        UnusableError: another start would fail too.
    """
    if find_failures(findings):
        raise (UnfitError if may_pass(findings, nodes) else UnusableError)(refusal(findings))


def refusal(findings: Sequence[Finding]) -> str:
    """Return the message of a job that does not start."""
    failures = lines(find_failures(findings))
    more = [f"and {len(failures) - _SHOWN} more: dist-mem doctor lists them all"] if len(failures) > _SHOWN else []
    head = "the preflight found problems that would break training (preflight=false skips it):"
    if all(finding.what == RENDEZVOUS for finding in find_failures(findings)):
        head = "the ranks have not come together:"
    return "\n".join([head, *failures[:_SHOWN], *more])

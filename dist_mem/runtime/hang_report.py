"""Hang reports: when nothing moves any more, each rank writes its position; the report names the suspected ranks.

    RUN/hangs/20261120T101500Z/rank-00003.txt   the position of rank 3, and the stacks of all its threads
    RUN/hangs/20261120T101500Z/report.txt       the suspected ranks and nodes, and where the others wait
    RUN/slurm/failed_nodes                      the suspected nodes, one per line, for the next start

When collectives hang, the file system is the only channel that the ranks share for certain.
"""

from __future__ import annotations

import faulthandler
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FAILED_NODES = Path("slurm") / "failed_nodes"  # in the run directory


class Position(NamedTuple):
    """The position of a rank in the training."""

    rank: int
    node: str
    pid: int
    step: int | None  # None: before the first
    phase: str
    beats: int  # calls of `beat` by its main thread; all ranks make the same calls
    idle: float  # seconds since the last beat

    @property
    def place(self) -> str:
        """The position as text: step and phase."""
        return self.phase if self.step is None else f"step {self.step}, {self.phase}"


def write_position(folder: Path, position: Position) -> bool:
    """Write the file of one rank, with the stacks of all threads, atomically. Return True."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{position.rank:05d}.txt"
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for name, value in position._asdict().items():
            file.write(f"{name}: {'-' if value is None else value}\n")
        file.write("\nThreads by name:\n")
        for thread in threading.enumerate():
            file.write(f"  0x{thread.ident or 0:016x} {thread.name}\n")
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    partial.replace(path)
    return True


def read_positions(folder: Path) -> list[Position]:
    """Return the positions that the ranks have written, sorted by rank."""
    found = []
    for path in sorted(folder.glob("rank-*.txt")):
        head = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        found.append(
            Position(
                rank=int(fields["rank"]),
                node=fields["node"],
                pid=int(fields["pid"]),
                step=None if fields["step"] == "-" else int(fields["step"]),
                phase=fields["phase"],
                beats=int(fields["beats"]),
                idle=float(fields["idle"]),
            )
        )
    return found


def suspects(positions: Sequence[Position], nodes: Sequence[str]) -> dict[int, str]:
    """Return the suspected ranks, each with the reason; none if all ranks wait for each other.

    Args:
        positions: of the ranks that have reported.
        nodes: of all ranks.
    """
    known_ranks = {position.rank for position in positions}
    silent = [rank for rank in range(len(nodes)) if rank not in known_ranks]
    if silent:
        return dict.fromkeys(silent, "has reported nothing: it is stopped or dead, or its node is")
    foremost = max(position.beats for position in positions)
    behind = [position for position in positions if position.beats < foremost]
    if len(behind) > len(nodes) / 2:  # most ranks wait for something that only a few have received
        return {}
    return {position.rank: f"is behind the others: {position.place}" for position in behind}


def report(positions: Sequence[Position], nodes: Sequence[str], *, seconds: float, folder: Path) -> str:
    """Return the report for the user; arguments as in `suspects`."""
    idle = max(position.idle for position in positions)
    lines = [f"hang: nothing has moved for {idle:.0f} s (watchdog.seconds = {seconds:g})"]
    found = suspects(positions, nodes)
    for why in dict.fromkeys(found.values()):
        ranks = [rank for rank in found if found[rank] == why]
        noun = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"suspect: {noun} {_spans(ranks)} ({_names([nodes[rank] for rank in ranks])}) {why}")
    if not found:
        phases = ", ".join(dict.fromkeys(position.phase for position in positions))
        lines.append(f"all ranks wait in {phases}: a stuck collective, or the network between {_names(nodes)}")
    places: dict[str, list[int]] = defaultdict(list)
    for position in positions:
        if position.rank not in found:
            places[position.place].append(position.rank)
    lines += [f"  waiting in {place}: rank {_spans(ranks)}" for place, ranks in places.items()]
    lines.append(f"stacks of all threads: {folder}")
    return "\n".join(lines)


def failed_nodes(run_dir: Path, positions: Sequence[Position], nodes: Sequence[str]) -> None:
    """Add the suspected nodes to the list that the next start may leave out."""
    path = run_dir / FAILED_NODES
    named = dict.fromkeys(nodes[rank] for rank in suspects(positions, nodes))
    if len(named) > max(1, len(set(nodes)) // 4):
        return  # the network or the file system is a likelier cause than so many nodes
    known = path.read_text(encoding="utf-8").split() if path.exists() else []
    new = [node for node in named if node not in known]
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{node}\n" for node in new))


def _names(nodes: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(nodes))
    return ", ".join(distinct[:8]) + (f" and {len(distinct) - 8} more" if len(distinct) > 8 else "")


def _spans(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, with ranges, as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

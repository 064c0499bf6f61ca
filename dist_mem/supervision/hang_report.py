"""Hang reports: when nothing moves any more, each rank writes its position; the report names the suspected ranks.

    RUN/hangs/20261120T101500Z/rank-00003.txt   the position of rank 3, and the stacks of all its threads
    RUN/hangs/20261120T101500Z/report.txt       the suspected ranks and nodes, and where the others wait
    RUN/slurm/failed_nodes                      the suspected nodes, one per line, for the next start

When collectives hang, the file system is the only channel that the ranks share for certain. Every rank writes one file;
only the lowest live rank reads the files, so the work of a thousand ranks grows with their number
and not with its square. The time that they have for it grows too.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.runtime.files import is_missing, open_regular, read_regular, read_together
from dist_mem.runtime.terminal import some
from dist_mem.supervision.flight_recorder import NO_VERDICT, Verdict

FAILED_NODES = Path("slurm") / "failed_nodes"  # in the run directory
_FILES_PER_SECOND = 400  # least rate at which a busy shared file system creates, finds or opens small files
_GATHER_SECONDS = 2.5  # longest wait for the files of a few ranks
_POLL_SECONDS = 0.1


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


def slack(num_ranks: int) -> float:
    """Return the seconds that a shared file system needs for one small file of every rank."""
    return num_ranks / _FILES_PER_SECOND


def write_position(folder: Path, position: Position) -> bool:
    """Write the file of one rank, with the stacks of all threads, atomically. Return True."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _file_of(folder, position.rank)
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


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.txt"


def gather_seconds(num_ranks: int) -> float:
    """Return the longest time for which `gather_positions` waits for files, in seconds; then it reads them."""
    return _GATHER_SECONDS + slack(num_ranks)


def gather_positions(folder: Path, *, rank: int, num_ranks: int) -> list[Position]:
    """Return the positions of the ranks on the lowest live rank, and nothing on the others.

    Rank 0 waits for the files of all ranks. The others wait for that of rank 0; if it does not come, they look for the
    first file that has come, that of the lowest live rank.
    """
    if rank == 0:
        wait_for(lambda: _num_reported(folder) == num_ranks, gather_seconds(num_ranks))
        return read_positions(folder)
    if wait_for(lambda: _exists(_file_of(folder, 0), rank), gather_seconds(num_ranks), slack(num_ranks)):
        return []
    lowest = next(other for other in range(rank + 1) if _file_of(folder, other).exists())
    return read_positions(folder) if lowest == rank else []


def wait_for_report(folder: Path, *, rank: int, num_ranks: int, seconds: float) -> None:
    """Wait until the lowest live rank has written the report, or for `seconds`."""
    wait_for(lambda: _exists(folder / "report.txt", rank), seconds, slack(num_ranks))


def _num_reported(folder: Path) -> int:
    """Return the number of ranks that have written their files; only rank 0 lists the folder."""
    refresh(folder, 0)
    return len(list(folder.glob("rank-*.txt")))


def _exists(path: Path, rank: int) -> bool:
    refresh(path.parent, rank)
    return path.exists()


def refresh(folder: Path, rank: int) -> None:
    """Create and remove a file, which makes the client of a network file system read the folder again."""
    probe = folder / f".watchdog-{rank}"
    probe.touch()
    probe.unlink()


def wait_for(condition: Callable[[], bool], seconds: float, interval: float = 0.0) -> bool:
    """Wait until the condition holds, or for `seconds`; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(max(_POLL_SECONDS, min(interval, deadline - time.monotonic())))
    return holds


def read_positions(folder: Path) -> list[Position]:
    """Return the positions that the ranks have written, sorted by rank."""
    found = []
    for content in read_together(sorted(folder.glob("rank-*.txt"))):
        head = content.decode(errors="replace").partition("\n\n")[0]
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


def suspects(
    positions: Sequence[Position], nodes: Sequence[str], recorded: Verdict = NO_VERDICT, *, is_read: bool = True
) -> dict[int, str]:
    """Return the suspected ranks, each with the reason; none if all ranks wait for each other.

    Args:
        positions: of the ranks that have reported.
        nodes: of all ranks.
        recorded: of the flight recorder, which sees the devices: on GPUs, Python code runs ahead of them.
        is_read: False: the files of the other ranks could not be read in time, so nobody knows who has reported.
    """
    known_ranks = {position.rank for position in positions}
    silent = [rank for rank in range(len(nodes)) if rank not in known_ranks] if is_read else []
    if silent:
        return dict.fromkeys(silent, "has reported nothing: it is stopped or dead, or its node is")
    foremost = max(position.beats for position in positions)
    behind = {one.rank: f"is behind the others: {one.place}" for one in positions if one.beats < foremost}
    if recorded.suspects:
        return {rank: behind.get(rank, why) for rank, why in recorded.suspects.items()}
    # Else most ranks wait for something that only a few have received.
    return behind if len(behind) <= len(nodes) / 2 else {}


def report(
    positions: Sequence[Position],
    nodes: Sequence[str],
    suspected: Mapping[int, str],
    *,
    seconds: float,
    folder: Path,
    recorded: Sequence[str] = (),
    is_read: bool = True,
) -> str:
    """Return the report for the user.

    Args:
        suspected: found by `suspects`, from the same positions, nodes and `is_read`.
        recorded: lines of the flight recorder.
    """
    idle = max(position.idle for position in positions)
    lines = [f"hang: nothing has moved for {idle:.0f} s (watchdog.seconds = {seconds:g})"]
    reasons: dict[str, list[int]] = defaultdict(list)
    for rank, why in suspected.items():
        reasons[why].append(rank)
    for why, ranks in reasons.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"suspect: {noun} {_spans(ranks)} ({some(dict.fromkeys(nodes[rank] for rank in ranks))}) {why}")
    if not is_read:
        lines.append(f"{folder} does not answer in time: what the other ranks have written there may name a suspect")
    elif not suspected:
        phases = ", ".join(dict.fromkeys(position.phase for position in positions))
        between = some(dict.fromkeys(nodes))
        lines.append(f"all ranks wait in {phases}: a stuck collective, or the network between {between}")
    places: dict[str, list[int]] = defaultdict(list)
    for position in positions:
        if position.rank not in suspected:
            places[position.place].append(position.rank)
    lines += [f"  waiting in {place}: rank {_spans(ranks)}" for place, ranks in places.items()]
    lines += recorded
    lines.append(f"stacks of all threads: {folder}")
    return "\n".join(lines)


def note_failed_nodes(run_dir: Path, names: Collection[str], nodes: Iterable[str]) -> None:
    """Add nodes to the list that the next start may leave out.

    Unless they are so many that the network, the file system or the request is a likelier cause.

    Args:
        names: without repetitions.
        nodes: of all ranks that are known.

    Raises:
        OSError: the list cannot be written.
    """
    if len(names) > max(1, len({*nodes, *names}) // 4):
        return
    path = run_dir / FAILED_NODES
    known = [] if is_missing(path) else read_regular(path).decode(errors="replace").split()
    if new := [node for node in names if node not in known]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(path, "ab") as file:
            file.write("".join(f"{node}\n" for node in new).encode())


def _spans(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, with ranges, as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

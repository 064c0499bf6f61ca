"""The flight recorder of collectives: names the rank that has not joined the collective in which the others wait.

On GPUs, a rank's Python code runs ahead of its device, so its progress marks (watchdog.py) may be past the collective
in which the job hangs. torch records the last 2,000 collectives of a process (TORCH_FR_BUFFER_SIZE), and the device
says which of them it has started and completed. All ranks of a group number its collectives alike.

    RUN/hangs/<start>/collectives-00003.json   the last finished and the first unfinished collectives of rank 3

The watchdog writes these files and adds the verdict to its report. gloo's collectives on CPUs are recorded too.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

from dist_mem.runtime.files import read_together
from dist_mem.runtime.terminal import some

_KEPT = 8  # of a group, the last finished and the first unfinished collectives that are written
_SUFFIX = ".json"


class CollectiveProgress(NamedTuple):
    """Collectives of one group on one rank, by number; the numbers begin at 1."""

    operations: dict[int, str]  # of those that are still known, as "nccl:all_reduce of 1,024 Float"
    enqueued: int  # highest number that the rank's Python code has reached
    started: frozenset[int]  # started by the device and not complete; empty without TORCH_NCCL_ENABLE_TIMING
    pending: int | None  # lowest number that is not complete; None: all are


class Verdict(NamedTuple):
    """What the recorders of all ranks show."""

    suspects: dict[int, str]  # rank -> reason; empty if they name none
    lines: list[str]  # of the report, one for each group in which ranks wait


NO_VERDICT = Verdict({}, [])


def save(folder: Path, rank: int) -> None:
    """Write the recorders of this process into the folder of a hang report, atomically."""
    dumps = {name: _read(name, dump) for name, dump in _recorders().items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"collectives-{rank:05d}{_SUFFIX}"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dumps), encoding="utf-8")
    partial.replace(path)


def _read(name: str, dump: Callable[[], str | bytes]) -> dict[str, Any]:
    """Return what a recorder has, or why it cannot be read: that of another backend may be the one that is needed."""
    try:
        return _shorten(json.loads(dump()), name)
    except Exception as error:  # of any type: torch's own, or another version's form
        return {"entries": [], "error": f"{type(error).__name__}: {error}"}


def _recorders() -> dict[str, Callable[[], str | bytes]]:
    names = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}  # a torch without CUDA has only the second
    found = {name: getattr(_distributed_c10d, function, None) for name, function in names.items()}
    return {name: dump for name, dump in found.items() if dump is not None}


def _shorten(dump: dict[str, Any], recorder: str) -> dict[str, Any]:
    """Return a dump with those collectives of every group that the verdict needs: 1,024 ranks write it to one disk."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in dump.get("entries", ()):  # an unused recorder has no such key
        groups[entry["process_group"][0]].append(entry)
    kept: list[dict[str, Any]] = []
    for entries in groups.values():
        finished = [entry for entry in entries if _is_complete(entry, recorder)]
        unfinished = [entry for entry in entries if not _is_complete(entry, recorder)]
        last = unfinished[_KEPT:][-1:]  # how far the rank's Python code has run ahead
        kept += [*finished[-_KEPT:], *unfinished[:_KEPT], *last]
    return {**dump, "entries": kept}


def _is_complete(entry: Mapping[str, Any], recorder: str) -> bool:
    # gloo records no states, but retires what has ended. NCCL also retires what has timed out.
    return entry["state"] == "completed" or (recorder == "gloo" and bool(entry["retired"]))


def read_verdict(folder: Path) -> Verdict:
    """Return what the files of a hang report's folder show together."""
    groups: dict[str, dict[int, CollectiveProgress]] = defaultdict(dict)
    unread: dict[str, list[int]] = defaultdict(list)  # reason -> ranks
    paths = sorted(folder.glob(f"collectives-*{_SUFFIX}"))
    for path, content in zip(paths, read_together(paths), strict=True):
        rank = int(path.stem.rpartition("-")[2])
        for recorder, dump in json.loads(content).items():
            if "error" in dump:
                unread[f"{recorder} recorder cannot be read ({dump['error']})"].append(rank)
            for name, progress in _progress(dump["entries"], recorder):
                groups[name][rank] = progress
    suspects: dict[int, str] = {}
    lines = [f"  the {reason} on rank {some(sorted(ranks))}" for reason, ranks in unread.items()]
    for name, ranks in groups.items():
        found = _judge(name, ranks)
        suspects = {**found.suspects, **suspects}
        lines += found.lines
    return Verdict(suspects, lines)


def _progress(entries: Sequence[Mapping[str, Any]], recorder: str) -> Iterator[tuple[str, CollectiveProgress]]:
    """Yield the name of every group and this rank's progress in it."""
    by_group: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        if not entry["is_p2p"]:
            name, meaning = entry["process_group"]
            by_group[f"{recorder} group {name}" + (f" ({meaning})" if meaning not in ("", "undefined") else "")].append(
                entry
            )
    for name, found in by_group.items():
        unfinished = [entry for entry in found if not _is_complete(entry, recorder)]
        yield (
            name,
            CollectiveProgress(
                operations={entry["collective_seq_id"]: _operation(entry) for entry in found},
                enqueued=max(entry["collective_seq_id"] for entry in found),
                started=frozenset(entry["collective_seq_id"] for entry in unfinished if entry["state"] == "started"),
                pending=min((entry["collective_seq_id"] for entry in unfinished), default=None),
            ),
        )


def _operation(entry: Mapping[str, Any]) -> str:
    numbers = sum(math.prod(sizes) for sizes in entry["input_sizes"])
    return f"{entry['profiling_name']} of {numbers:,} {'/'.join(dict.fromkeys(entry['input_dtypes']))}"


def _judge(group: str, ranks: Mapping[int, CollectiveProgress]) -> Verdict:
    """Find the ranks that have not joined the first collective of a group that is not complete.

    Args:
        ranks: those that have recorded collectives of the group.
    """
    waited_for = min((one.pending for one in ranks.values() if one.pending is not None), default=None)
    if waited_for is None:
        return NO_VERDICT
    texts = Counter(one.operations[waited_for] for one in ranks.values() if waited_for in one.operations)
    usual = texts.most_common(1)[0][0]
    what = f"collective {waited_for:,} of {group}, {usual}"
    odd = {rank for rank, one in ranks.items() if one.operations.get(waited_for, usual) != usual}
    reasons = (
        ("has not reached", {rank for rank, one in ranks.items() if one.enqueued < waited_for}),
        ("is in another one than", odd if len(odd) < len(ranks) / 2 else set()),
        ("has not started on its device", _not_started(ranks, waited_for)),
    )
    for reason, behind in reasons:
        if 0 < len(behind) <= len(ranks) / 2:  # else the few others are the odd ones
            line = f"  waiting in {what}, which rank {some(sorted(behind))} {reason}"
            return Verdict(dict.fromkeys(sorted(behind), f"{reason} {what}"), [line])
    others = "".join(f"; {count} ranks in {text}" for text, count in texts.items() if text != usual)
    return Verdict({}, [f"  waiting in {what}: no rank stands out{others}"])


def _not_started(ranks: Mapping[int, CollectiveProgress], number: int) -> set[int]:
    """Return the ranks whose device has not started a collective that another one has."""
    waiting = {rank for rank, one in ranks.items() if number in one.started}
    return {rank for rank, one in ranks.items() if one.pending == number} - waiting if waiting else set()

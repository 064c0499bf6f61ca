"""The options of sbatch in `launch.directives`: which of them are refused, and why; and the GPUs that one requests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# One letter -> its option, for those that this module knows by name.
_LETTERS = {
    **{"a": "array", "A": "account", "c": "cpus-per-task", "d": "dependency", "D": "chdir", "G": "gpus", "h": "help"},
    **{"J": "job-name", "k": "no-kill", "M": "clusters", "n": "ntasks", "N": "nodes", "p": "partition", "q": "qos"},
    **{"t": "time", "V": "version", "W": "wait", "x": "exclude"},
}
_WITHOUT_VALUE = "hHOQsvVW"  # letters
# Options that are keys: the same value in two places would one day differ.
_KEYS = {
    "nodes": "launch.nodes",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu"), "launch.tasks_per_node"),
    "cpus-per-task": "launch.cpus_per_task",
    "time": "launch.time",
    "partition": "launch.partition",
    "account": "launch.account",
    "qos": "launch.qos",
    "job-name": "name",
    **dict.fromkeys(("requeue", "no-requeue"), "launch.restart"),
    **dict.fromkeys(("gpus-per-node", "gpus", "gpus-per-task", "gpus-per-socket"), "launch.gpus_per_node"),
    **dict.fromkeys(("tres-per-node", "tres-per-job", "tres-per-socket", "tres-per-task"), "launch.gpus_per_node"),
    "dependency": "launch.dependency",
    "cpu-bind": "launch.cpu_bind",
    "mem": "launch.memory",
    "signal": "launch.signal_seconds",
}
_READ = ("gres", "chdir", "exclude", "exclusive", "clusters", "reservation", "wckey")  # by this program
# Options that change what a job is.
_REFUSED = {
    "array": "its tasks would be jobs of one run directory, which is of one job; `dist-mem sweep --slurm` submits many",
    "test-only": "it submits nothing; `dist-mem launch --dry-run` prints the script",
    "wait": "the command would wait for the end of the job; `dist-mem logs --follow` does",
    "no-kill": "training cannot go on without one of its nodes; without this option Slurm requeues the job",
    "wrap": "the script has its commands already; see launch.setup",
    **dict.fromkeys(("help", "usage", "version", "parsable"), "it changes the answer of sbatch, which dist-mem reads"),
}
_KIND = r"(?!\d+[kmgtpKMGTP](?![\w.-]))[\w.-]*[^\W\d][\w.-]*"  # a100, 1g.5gb; but 2k is a number
_GPU = re.compile(rf"(?:gres[:/])?gpu(?::{_KIND})?(?::(?P<number>\d{{1,4}}))?(?:\([\w,:-]*\))?")


class Option(NamedTuple):
    """An option of sbatch by its long name; by its letter if this module does not know it."""

    name: str
    value: str | None


def parse(text: str) -> Option:
    """Return the option of a directive, in any form that sbatch takes on a line of a script.

    Raises:
        ValueError: it is not exactly one option.
    """
    form = "must be one option of sbatch, as --constraint=a100"
    try:
        first, *others = shlex.split(text, comments=True) or [""]  # as sbatch takes a line apart
    except ValueError:
        raise ValueError(f"{form}, with its quotes closed") from None
    found = re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?|-([A-Za-z])(.*)", first, re.DOTALL)
    if not found or "\n" in text or (found[3] and found[3] in _WITHOUT_VALUE and found[4]):
        raise ValueError(form)
    is_whole = found[2] is not None or bool(found[4])
    if len(others) > (0 if is_whole else 1) or any(word.startswith("-") for word in others):
        raise ValueError(f"{form}; write each in an item of its own")
    name = found[1] or _LETTERS.get(found[3], found[3])
    return Option(name, (found[2] or found[4] or "") if is_whole else next(iter(others), None))


def problems(directives: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with directives, each with its index."""
    seen: set[str] = set()
    for index, text in enumerate(directives):
        try:
            name, value = parse(text)
        except ValueError as error:
            yield index, f"is {text!r}, but {error}"
            continue
        if fault := _fault(name, value):
            yield index, f"is {text!r}, {fault}"
        elif name in seen:
            yield index, f"is {text!r}, but --{name} is there already, and sbatch would take one of them; give one"
        seen.add(name)


def _fault(name: str, value: str | None) -> str | None:
    known = (*_KEYS, *_REFUSED, *_READ)
    if name in _KEYS:
        return f"which is a key of its own: set {_KEYS[name]}"
    if name in _REFUSED:
        return f"which no job of a run can have: {_REFUSED[name]}"
    if name not in known and (meant := [option for option in known if len(name) > 1 and option.startswith(name)]):
        return f"which is short for --{' or --'.join(meant)}: write the option in full"
    if name == "gres" and _gpus(value or "") is None:
        return "but must request GPUs as gpu:4, gpu:a100:4, or several of these after commas"
    return None


def names(directives: Sequence[str]) -> set[str]:
    """Return the options that checked directives contain."""
    return {parse(text).name for text in directives}


def option(directives: Sequence[str], name: str) -> str | None:
    """Return the value of an option that checked directives contain; None if they do not."""
    return next((found.value for found in map(parse, directives) if found.name == name), None)


def other_folder(directives: Sequence[str]) -> str | None:
    """Return the folder that a job starts in by a checked directive --chdir; None if it is this process's own."""
    folder = option(directives, "chdir")
    return None if folder is None or Path(folder).resolve() == Path.cwd().resolve() else folder


def gpus_of_gres(directives: Sequence[str]) -> int | None:
    """Return the GPUs of a node that a checked directive --gres requests; None if none requests any."""
    gres = option(directives, "gres") or ""
    return _gpus(gres) if "gpu" in gres else None


def _gpus(gres: str) -> int | None:
    """Return the sum over all kinds of GPUs, as of gpu:a100:2,gpu:v100:2,tmp:1G; None if a part is not understood."""
    parts = [part for part in re.split(r",(?![^(]*\))", gres) if "gpu" in part]
    found = [_GPU.fullmatch(part) for part in parts]
    return sum(int(part["number"] or 1) for part in found if part) if all(found) else None

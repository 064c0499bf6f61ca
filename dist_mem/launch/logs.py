"""`dist-mem logs`: print the end of the newest job's logs: of its batch script and of the ranks of each node.

If the watchdog has ended the newest start, its report follows.
"""

from __future__ import annotations

import codecs
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.launch import queue, slurm
from dist_mem.launch.status import check_run_dir
from dist_mem.runtime.files import open_regular, read_regular

_CHUNK = 1 << 20  # bytes at the end of a log that are searched for lines
_POLL_SECONDS = 0.5
_LOOKS_PER_QUERY = 10  # looks at the logs for each query to Slurm whether a job still runs


def run(run_dir: Path, *, num_lines: int, follow: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Print the last lines of each log; with `follow`, also new lines until no job of the run is queued or running.

    Args:
        sleep: waits between two looks at the logs.

    Raises:
        UnusableError: there is no run directory, or it contains no log.
        UnfitError: Slurm does not answer.
    """
    check_run_dir(run_dir)
    paths = files_of(run_dir)
    if not paths and not (follow and _may_have_jobs(run_dir)):
        raise UnusableError(_describe_missing_logs(run_dir))
    offsets: dict[Path, int] = {}
    for path in paths:
        text, offsets[path] = _end_of(path, num_lines)
        print(f"==> {path} <==\n{text}", flush=True)
    for path in sorted(run_dir.glob("hangs/*/report.txt"))[-1:]:
        if _time_of(path) >= _time_of(run_dir / "starts.jsonl"):  # which each start writes
            print(f"==> {path} <==\n{read_regular(path).decode(errors='replace')}", flush=True)
    if follow:
        _follow(run_dir, offsets, sleep)
    return EXIT_DONE


def files_of(run_dir: Path) -> list[Path]:
    """Return the logs of the newest job that has begun: its batch script's, then one per node; else RUN/*.log."""
    newest = _newest_folder(run_dir)
    if newest is None or newest.stat().st_mtime < _time_of(run_dir / queue.JOBS):
        jobs = queue.look(run_dir).jobs if slurm.is_here() else []  # the last may have ended before it knew the folder
        if jobs and (logs := queue.logs_of(jobs[-1])):
            return logs
    if newest is None:
        return sorted(run_dir.glob("*.log"))
    return _files_in(newest)


def _newest_folder(run_dir: Path) -> Path | None:
    """Return the folder of the newest start; None if no job has got as far."""
    folders = [path for path in run_dir.glob("slurm/*") if (path / "output").is_symlink() or any(path.glob("*.log"))]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def _files_in(folder: Path) -> list[Path]:
    scripts = dict.fromkeys(Path(os.path.realpath(folder / name)) for name in ("output", "errors"))
    return [*(path for path in scripts if path.is_file()), *sorted(folder.glob("*.log"))]


def _time_of(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _describe_missing_logs(run_dir: Path) -> str:
    if recorded := queue.recorded_jobs(run_dir):
        number = recorded[-1].number
        return f"{run_dir}: job {number} has no log yet; `dist-mem status {run_dir}` shows whether it is queued"
    return (
        f"{run_dir}: no job and no log is in it: its training was not started by `dist-mem launch`, and wrote to "
        f"the terminal, or the file, of the command that started it; its metrics are in {run_dir / 'metrics.jsonl'}"
    )


def _end_of(path: Path, num_lines: int) -> tuple[str, int]:
    """Return the last lines of a file, and the position after them."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _CHUNK))
        text, position = _read_letters(file)
    return "".join(text.splitlines(keepends=True)[-num_lines:]), position


def _read_letters(file: BinaryIO) -> tuple[str, int]:
    """Return the rest of a file but a letter at its end that is half written, and the position after it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(file.read())
    return text, file.tell() - len(decoder.getstate()[0])


def _may_have_jobs(run_dir: Path) -> bool:
    """Return whether a job of the run is queued or running; True if unknown: Ctrl-C then ends the command."""
    return not queue.recorded_jobs(run_dir) or not slurm.is_here() or bool(queue.live(run_dir))


def _follow(run_dir: Path, offsets: dict[Path, int], sleep: Callable[[float], None]) -> None:
    last = next(reversed(offsets), None)
    has_jobs = True
    for look in itertools.count(1):
        if look % _LOOKS_PER_QUERY == 0:
            has_jobs = _may_have_jobs(run_dir)
        newest = _newest_folder(run_dir)  # without a question to Slurm at each look
        for path in _files_in(newest) if newest else []:
            text = _new_text(path, offsets)
            if text and path != last:
                print(f"\n==> {path} <==")
                last = path
            sys.stdout.write(text)
        sys.stdout.flush()
        if not has_jobs:
            return
        sleep(_POLL_SECONDS)


def _new_text(path: Path, offsets: dict[Path, int]) -> str:
    """Return the text that was appended to a file since the last call."""
    with open_regular(path) as file:
        file.seek(offsets.get(path, 0))
        text, offsets[path] = _read_letters(file)
    return text

"""`dist-mem status`: show the state of runs, from their directories and from Slurm.

The command changes nothing and does not load torch. Each figure comes from what the run itself writes: metrics.jsonl,
checkpoints, the lease, and the exit codes that the batch script writes to RUN/slurm/JOB/exit_code.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.config import TrackingConfig, TrainConfig, load_block
from dist_mem.config.load import BlockT
from dist_mem.errors import EXIT_DONE, MEANINGS, RunError, UnfitError, UnusableError, run_error
from dist_mem.launch import queue, slurm
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import MAX_INTEGER
from dist_mem.runtime.files import is_missing, open_regular, read_regular
from dist_mem.runtime.terminal import label_lines, table
from dist_mem.supervision.lease import sign_of_life
from dist_mem.tracking.log import METRICS_FILE, last_point
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.provenance import without_credentials

_GOODPUT = "goodput/"  # prefix of the shares of a run's time (dist_mem.training.goodput makes them)
_LOST = ("repeated", "down")  # of them: lost to restarts
_BAR = 40  # characters of all of a run's time
_SHOWN_OF_JOB = ("number", "state", "since", "nodes", "reason")
_COLUMNS = ("run", "state", "step", "loss", "left", "checkpoint")  # of a list of runs
_SMALL = 0.01  # share of a part that is not named
_MARKERS = (METRICS_FILE, "checkpoints", "slurm", "lease.json")  # any of them marks a run; a config.yaml does not


def run(run_dirs: Sequence[Path], *, as_json: bool) -> int:
    """Print the state of runs, and of those in other folders a line each.

    Args:
        as_json: print one object per line, with the keys of `read_state`.

    Raises:
        UnusableError: a folder is no run directory and has none; or a file of a run cannot be read, after the others.
        UnfitError: Slurm does not answer.
    """
    errors: list[RunError] = []
    try:
        found = [(folder, list(_states(_runs_in(folder), errors))) for folder in run_dirs]
    except OSError as error:
        raise run_error(error) from error
    for folder, states in found:
        if as_json:
            lines = [json_text(state) for state in states]
        elif _is_run(folder):
            lines = [line for state in states for line in (state["run"], *label_lines(_describe(state), indent="  "))]
        else:
            notes = [f"note: {text}" for state in states for text in state["other_jobs"]]
            lines = [*table([_COLUMNS, *map(_line_of, states)]), *notes]
        print("\n".join(lines))
    if errors:
        kind = UnusableError if all(isinstance(error, UnusableError) for error in errors) else UnfitError
        raise kind("; ".join(map(str, errors)))
    return EXIT_DONE


def _states(runs: Sequence[Path], errors: list[RunError]) -> Iterator[dict[str, Any]]:
    """Yield the states of runs; add the errors of those that cannot be read to `errors`."""
    for run_dir in runs:
        try:
            yield read_state(run_dir)
        except UnfitError:  # Slurm answers none of them
            raise
        except (OSError, RunError) as error:
            errors.append(run_error(error))


def check_run_dir(run_dir: Path) -> None:
    """Raise UnusableError if a folder is not a run directory."""
    if not _is_run(run_dir):
        raise UnusableError(f"{run_dir}: no run directory: it has none of {', '.join(_MARKERS)}")


def _is_run(folder: Path) -> bool:
    is_study = (folder / "slurm" / "runs.txt").exists()  # of version 0.1.0; its runs are in folders of their own
    return not is_study and any((folder / name).exists() for name in _MARKERS)


def _runs_in(folder: Path) -> list[Path]:
    """Return a run directory itself, or all that are in another folder, sorted. Raises UnusableError for none."""
    runs, visited = [], set[str]()
    for path, inner, _ in os.walk(folder, followlinks=True):
        real, run_dir = os.path.realpath(path), Path(path)
        if real not in visited and _is_run(run_dir):
            runs.append(run_dir)
        if real in visited or run_dir in runs:
            inner.clear()
        visited.add(real)
        inner[:] = _order(run_dir, inner)
    if not runs:
        raise UnusableError(f"{folder}: no run directory is here: each has one of {', '.join(_MARKERS)}")
    return sorted(runs)


def _order(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the folders to look into, links last: a run that is there twice has its own name. Not .venv, .git."""
    kept = (name for name in names if not name.startswith("."))
    return sorted(kept, key=lambda name: ((folder / name).is_symlink(), name))


def _line_of(state: Mapping[str, Any]) -> list[str]:
    step, steps, saved = state["step"], state["steps"], state["checkpoint"]
    return [
        state["run"],
        state["state"],
        f"{step or 0:,}{f' of {steps:,}' if steps else ''}",
        "" if state["loss"] is None else f"{state['loss']:.4f}",
        "" if state["seconds_left"] is None else _duration(state["seconds_left"]),
        f"step {saved['step']:,}, {_duration(saved['age_seconds'])} old" if saved else "none",
    ]


def read_state(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run; a value is None if it is unknown.

    Returns:
        run, state (running, queued, finished, stopped; unknown: its cluster is not reached), jobs (number, state,
        since, nodes, reason of each), other_jobs (why jobs of recorded numbers are none of the run's, or are not
        known), process (of a live one), step, steps, loss, tokens_per_second, steps_per_second, mfu, goodput (share of
        each part of the run's time, and its seconds), seconds_left, checkpoint (step, age_seconds), last_end (job,
        exit_code, meaning), mlflow (run_id, uri).
    """
    check_run_dir(run_dir)
    found, is_known = queue.RunJobs([], []), True
    try:
        found = queue.look(run_dir) if slurm.is_here() else found
    except UnusableError as error:  # of another cluster
        found, is_known = queue.RunJobs([], [str(error)]), False
    live = sorted((job for job in found.jobs if not job.has_ended), key=lambda job: job.waits)
    process = sign_of_life(run_dir)
    finished, steps = read_finished(run_dir), _saved_block(run_dir, TrainConfig, "train").steps
    steps = steps if type(steps) is int and 0 < steps <= MAX_INTEGER else finished.step if finished else None
    point = last_point(run_dir / METRICS_FILE, "loss")
    step, metrics = (point.step, dict(point.metrics)) if point else (None, {})
    seconds = metrics.get("step_seconds")
    if any(not job.waits for job in live) or process:
        state = "running"
    elif live:
        state = "queued"
    else:
        state = "finished" if finished else "stopped" if is_known else "unknown"
    return {
        "run": str(run_dir),
        "state": state,
        "jobs": [{name: getattr(job, name) for name in _SHOWN_OF_JOB} for job in live or found.jobs[-1:]],
        "other_jobs": found.others,
        "process": process,
        "step": step,
        "steps": steps,
        "loss": metrics.get("loss"),
        "tokens_per_second": metrics.get("tokens_per_second"),
        "steps_per_second": 1 / seconds if seconds else None,
        "mfu": metrics.get("mfu"),
        "goodput": {n.removeprefix(_GOODPUT): v for n, v in metrics.items() if n.startswith(_GOODPUT)} or None,
        "seconds_left": max(0, steps - step) * seconds if steps is not None and step is not None and seconds else None,
        "checkpoint": _checkpoint(run_dir),
        "last_end": last_end(run_dir),
        "mlflow": _mlflow(run_dir),
    }


def _saved_block(run_dir: Path, schema: type[BlockT], name: str) -> BlockT:
    """Return a block of the run's configuration; the defaults if there is none, or it uses a variable not set here."""
    path = run_dir / "config.yaml"
    if is_missing(path):
        return schema()
    open_regular(path).close()
    with suppress(ValueError):
        return load_block(schema, name, [], saved=path)
    return schema()


def _checkpoint(run_dir: Path) -> dict[str, Any] | None:
    for step in reversed(list_steps(run_dir)):
        with suppress(OSError):  # just deleted, or not complete
            saved = (step_dir(run_dir, step) / "manifest.json").stat().st_mtime
            return {"step": step, "age_seconds": max(0.0, time.time() - saved)}
    return None


def last_end(run_dir: Path) -> dict[str, Any] | None:
    """Return how the newest finished start ended; a start whose batch script was killed leaves no exit code."""
    found = (folder / "exit_code" for folder in run_dir.glob("slurm/*/"))
    codes = [(path.lstat().st_mtime, path) for path in found if not is_missing(path)]
    for _, path in sorted(codes, reverse=True):
        text = read_regular(path)
        with suppress(ValueError):  # it is being written
            code = int(text)
            return {"job": path.parent.name, "exit_code": code, "meaning": meaning_of(code)}
    return None


def meaning_of(code: int) -> str:
    """Return the meaning of an exit code of a job."""
    if code in MEANINGS:
        return MEANINGS[code]
    with suppress(ValueError):
        return f"a rank was ended by {signal.Signals(code - 128).name}"
    return "a rank exited with this code; see `dist-mem logs`"


def _mlflow(run_dir: Path) -> dict[str, str | None] | None:
    if is_missing(run_dir / RUN_ID_FILE):
        return None
    run_id, uri = read_regular(run_dir / RUN_ID_FILE).decode(errors="replace").strip(), None
    with suppress(ValueError):  # no address
        given = _saved_block(run_dir, TrackingConfig, "tracking").uri
        uri = without_credentials(given) if isinstance(given, str) else None
    return {"run_id": run_id, "uri": uri}


def _describe(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts for the terminal."""
    yield "state", state["state"] + (f": {state['process']}" if state["process"] else "")
    for job in state["jobs"]:
        where, start = (f" on {job['nodes']}", "started") if job["nodes"] else (f" ({job['reason']})", "to start")
        when = "" if job["since"] in ("N/A", "Unknown") else f", {start} {job['since'].replace('T', ' ')}"
        yield f"job {job['number']}", f"{job['state'].lower()}{where}{when}"
    yield from (("note", text) for text in state["other_jobs"])
    yield "step", ", ".join(_measures(state)) if state["step"] is not None else "none yet"
    if state["goodput"]:
        yield "goodput", _bar(state["goodput"])
        if others := _other_parts(state["goodput"]):
            yield "", others
    saved = state["checkpoint"]
    yield "checkpoint", f"step {saved['step']:,}, {_duration(saved['age_seconds'])} old" if saved else "none"
    if end := state["last_end"]:
        yield "last end", f"exit code {end['exit_code']} (job {end['job']}): {end['meaning']}"
    if mlflow := state["mlflow"]:
        yield "MLflow", mlflow["run_id"] + (f" at {mlflow['uri']}" if mlflow["uri"] else "")


def _measures(state: Mapping[str, Any]) -> Iterator[str]:
    yield f"{state['step']:,}" + (f" of {state['steps']:,}" if state["steps"] else "")
    yield f"loss {state['loss']:.4f}"
    if state["tokens_per_second"]:
        yield f"{state['tokens_per_second']:,.0f} tokens/s"
    if state["mfu"] is not None:
        yield f"MFU {state['mfu']:.1%}"
    if state["steps_per_second"]:
        yield f"{state['steps_per_second']:,.3g} steps/s"
    if state["seconds_left"]:
        yield f"{_duration(state['seconds_left'])} left at this rate"


def _bar(goodput: Mapping[str, float]) -> str:
    """Draw the useful share of the run's time up to its last point."""
    useful = goodput.get("useful", 0.0)
    filled = round(_BAR * min(1.0, max(0.0, useful)))
    whole = _duration(goodput.get("seconds", math.nan))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] useful {useful:.1%} of {whole}"


def _other_parts(goodput: Mapping[str, float]) -> str:
    """Name the other parts of the run's time, the largest first, and together those below one per cent."""
    parts = {name: share for name, share in goodput.items() if name not in ("useful", "seconds")}
    large = sorted((name for name, share in parts.items() if share >= _SMALL), key=lambda name: -parts[name])
    named = [f"{name}{' (lost to restarts)' if name in _LOST else ''} {parts[name]:.1%}" for name in large]
    rest = sum(share for name, share in parts.items() if name not in large)
    return ", ".join([*named, *([f"others {rest:.1%}"] if rest else [])])


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if 0 <= seconds < 1e12 else "unknown time"

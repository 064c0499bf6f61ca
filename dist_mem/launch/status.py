"""`dist-mem status`: show the state of runs, from their directories and from Slurm.

The command changes nothing and does not load torch. Each figure comes from what the run itself writes: metrics.jsonl,
checkpoints, the lease, and the exit codes that the batch script writes to RUN/slurm/JOB/exit_code.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.launch import queue
from dist_mem.runtime.lease import sign_of_life
from dist_mem.tracking.provenance import without_credentials
from dist_mem.tracking.run_id import RUN_ID_FILE
from dist_mem.tracking.sinks import METRICS_FILE

_TAIL = 1 << 18  # bytes read from the end of metrics.jsonl
_MARKERS = ("config.yaml", METRICS_FILE, "checkpoints", "slurm", "lease.json")  # any of them marks a run directory
_MEANINGS = {
    0: "done",
    1: "something broke on the way: a disk, a network, a rank, an unfit node",
    2: "configuration, data or run directory are wrong",
    3: "training diverged",
    85: "stopped by a signal, by RUN/STOP or by the clock; all is saved",
    86: "the watchdog ended a job in which nothing moved",
    87: "another job had taken the run directory over",
}


def run(run_dirs: Sequence[Path], *, as_json: bool) -> int:
    """Print the state of the runs; as JSON: one object per line, with the keys of `facts_of`.

    Raises:
        UnusableError: a folder is not a run directory.
        UnfitError: Slurm does not answer.
    """
    found = [facts_of(run_dir) for run_dir in run_dirs]
    for facts in found:
        lines = [json.dumps(facts)] if as_json else [facts["run"], *(f"  {k:<11} {v}" for k, v in _described(facts))]
        print("\n".join(lines))
    return EXIT_DONE


def check_run_dir(run_dir: Path) -> None:
    """Raise UnusableError if a folder is not a run directory."""
    if not any((run_dir / name).exists() for name in _MARKERS):
        raise UnusableError(f"{run_dir}: no run directory: it has none of {', '.join(_MARKERS)}")


def facts_of(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run; a value is None if it is unknown.

    Returns:
        run, state (running, queued, finished, stopped), jobs (number, state, since, nodes, reason of each), process
        (of a live one), step, steps, loss, tokens_per_second, steps_per_second, seconds_left, checkpoint (step,
        age_seconds), last_end (job, exit_code, meaning), mlflow (run_id, uri).
    """
    check_run_dir(run_dir)
    jobs = queue.look(queue.numbers_here(run_dir)) if queue.recorded(run_dir) and queue.is_here() else []
    live = sorted((job for job in jobs if not job.has_ended), key=lambda job: job.waits)
    process = sign_of_life(run_dir)
    finished, training = _read_json(run_dir / "finished.json"), _config(run_dir, "train")
    if any(not job.waits for job in live) or process:
        state = "running"
    elif live:
        state = "queued"
    else:
        state = "finished" if finished else "stopped"
    steps = training.get("steps") if isinstance(training, Mapping) else None
    return {
        "run": str(run_dir),
        "state": state,
        "jobs": [job._asdict() for job in live or jobs[-1:]],
        "process": process,
        **_progress(run_dir, steps if isinstance(steps, int) else finished.get("step")),
        "checkpoint": _checkpoint(run_dir),
        "last_end": _last_end(run_dir),
        "mlflow": _mlflow(run_dir),
    }


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _config(run_dir: Path, key: str) -> Any:
    """Return a value of the run's configuration; None if it is missing, or uses a variable that is not set here."""
    with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException):
        found = OmegaConf.select(OmegaConf.load(run_dir / "config.yaml"), key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    return None


def _progress(run_dir: Path, steps: int | None) -> dict[str, Any]:
    """Return the figures of the last logged step of training."""
    step, metrics = _last_point(run_dir / METRICS_FILE)
    seconds = metrics.get("step_seconds")
    left = None if steps is None or step is None or not seconds else max(0, steps - step) * seconds
    return {
        "step": step,
        "steps": steps,
        "loss": metrics.get("loss"),
        "tokens_per_second": metrics.get("tokens_per_second"),
        "steps_per_second": 1 / seconds if seconds else None,
        "seconds_left": left,
    }


def _last_point(path: Path) -> tuple[int | None, dict[str, float]]:
    """Return the last point with a loss at the end of metrics.jsonl; a line that is being written is left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None, {}
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            point = json.loads(line)
            if "loss" in point["metrics"]:
                return int(point["step"]), dict(point["metrics"])
    return None, {}


def _checkpoint(run_dir: Path) -> dict[str, Any] | None:
    for step in reversed(list_steps(run_dir)):
        with suppress(OSError):  # just deleted, or not complete
            saved = (step_dir(run_dir, step) / "manifest.json").stat().st_mtime
            return {"step": step, "age_seconds": max(0.0, time.time() - saved)}
    return None


def _last_end(run_dir: Path) -> dict[str, Any] | None:
    """Return how the newest finished start ended; a start whose batch script was killed leaves no exit code."""
    codes = [(path.stat().st_mtime, path) for path in run_dir.glob("slurm/*/exit_code")]
    for _, path in sorted(codes, reverse=True):
        with suppress(OSError, ValueError):
            code = int(path.read_text(encoding="ascii"))
            return {"job": path.parent.name, "exit_code": code, "meaning": meaning_of(code)}
    return None


def meaning_of(code: int) -> str:
    """Return the meaning of an exit code, as in the table of launch/README.md."""
    if code in _MEANINGS:
        return _MEANINGS[code]
    with suppress(ValueError):
        return f"a rank was ended by {signal.Signals(code - 128).name}"
    return "a rank ended with this code of its own"


def _mlflow(run_dir: Path) -> dict[str, str | None] | None:
    with suppress(OSError):
        run_id = (run_dir / RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
        uri = _config(run_dir, "tracking.uri")
        return {"run_id": run_id, "uri": without_credentials(uri) if isinstance(uri, str) else None}
    return None


def _described(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts for the terminal."""
    yield "state", facts["state"] + (f": {facts['process']}" if facts["process"] else "")
    for job in facts["jobs"]:
        where, start = (f" on {job['nodes']}", "started") if job["nodes"] else (f" ({job['reason']})", "to start")
        when = "" if job["since"] in ("N/A", "Unknown") else f", {start} {job['since'].replace('T', ' ')}"
        yield f"job {job['number']}", f"{job['state'].lower()}{where}{when}"
    yield "step", ", ".join(_measures(facts)) if facts["step"] is not None else "none yet"
    saved = facts["checkpoint"]
    yield "checkpoint", f"step {saved['step']:,}, {_duration(saved['age_seconds'])} old" if saved else "none"
    if end := facts["last_end"]:
        yield "last end", f"exit code {end['exit_code']} (job {end['job']}): {end['meaning']}"
    if mlflow := facts["mlflow"]:
        yield "MLflow", mlflow["run_id"] + (f" at {mlflow['uri']}" if mlflow["uri"] else "")


def _measures(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['step']:,}" + (f" of {facts['steps']:,}" if facts["steps"] else "")
    yield f"loss {facts['loss']:.4f}"
    if facts["tokens_per_second"]:
        yield f"{facts['tokens_per_second']:,.0f} tokens/s"
    if facts["steps_per_second"]:
        yield f"{facts['steps_per_second']:,.3g} steps/s"
    if facts["seconds_left"]:
        yield f"{_duration(facts['seconds_left'])} left at this rate"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

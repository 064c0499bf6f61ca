"""`dist-mem doctor --drill`: break a small job of two ranks in every way that occurs on a cluster, and resume it.

    a job starts -> a fault is injected -> exit codes, checkpoint -> the same command again -> 20 more steps

Finally, an undisturbed job makes the same steps: the losses of a resumed job must equal its losses to the last bit.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_mem.config import load_config
from dist_mem.doctor.drill_job import RANKS, SAVE_EVERY, DrillError, DrillJob, prepare, wait_for
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_REQUEUE, EXIT_USAGE
from dist_mem.runtime.ranks import is_rank0
from dist_mem.runtime.signals import LEAST_SECONDS, STOP_FILE
from dist_mem.supervision.watchdog import report_seconds
from dist_mem.tracking.log import METRICS_FILE, read_points

_BREAK_AT = SAVE_EVERY + 5  # steps: a checkpoint exists, but not of the last step
_RESUMED_STEPS = 20  # steps after the resume
_WATCHDOG_SECONDS = 5.0
_MLFLOW_SECONDS = 10.0  # that the end of a job may take if the server drops packets
_LINE = "{:<22} {:<12} {:<12} {:<12} {:>7}  {}"


@dataclass
class Row:
    """The outcome of one job: a line of the table."""

    name: str
    codes: str = "-"
    checkpoint: str = "-"
    resumed: str = "-"
    problem: str | None = None  # None: it survived
    seconds: float = 0.0

    def __str__(self) -> str:
        outcome = "yes" if self.problem is None else f"NO: {self.problem}"
        return _LINE.format(self.name, self.codes, self.checkpoint, self.resumed, f"{self.seconds:.0f}", outcome)


def break_by_signal(job: DrillJob) -> list[int]:
    job.start()
    job.wait_for_step(_BREAK_AT)
    job.signal(1, signal.SIGTERM)
    return expect_codes(job, [EXIT_REQUEUE] * RANKS)


def break_by_file(job: DrillJob) -> list[int]:
    """Stop the job with the file RUN/STOP, which also prevents a start until it is removed."""
    job.start()
    job.wait_for_step(_BREAK_AT)
    (job.run_dir / STOP_FILE).touch()
    codes = expect_codes(job, [EXIT_REQUEUE] * RANKS)
    job.start()
    expect_codes(job, [EXIT_USAGE] * RANKS)
    (job.run_dir / STOP_FILE).unlink()
    return codes


def break_by_clock(job: DrillJob) -> list[int]:
    """Stop the job with DIST_MEM_JOB_END, set from the time that the first job took to start."""
    left = LEAST_SECONDS + 2 * job.usual_start + 3
    job.start(DIST_MEM_JOB_END=str(int(time.time() + left)))
    return expect_codes(job, [EXIT_REQUEUE] * RANKS)


def break_by_kill(job: DrillJob) -> list[int]:
    job.start()
    job.wait_for_step(_BREAK_AT)
    job.signal(1, signal.SIGKILL)
    return expect_codes(job, [EXIT_FAILED, -signal.SIGKILL])


def break_by_stopped_rank(job: DrillJob) -> list[int]:
    """Stop a rank with SIGSTOP; the watchdog of the other rank must end the job and name it."""
    job.start(f"watchdog.seconds={_WATCHDOG_SECONDS}")
    job.wait_for_step(_BREAK_AT)
    job.signal(1, signal.SIGSTOP)
    began = time.monotonic()
    wait_for(lambda: job.processes[0].poll() is not None, "the watchdog to end rank 0")
    took, limit = time.monotonic() - began, _WATCHDOG_SECONDS + report_seconds(2) + 5
    job.signal(1, signal.SIGKILL)
    codes = expect_codes(job, [EXIT_HUNG, -signal.SIGKILL])
    reports = list((job.run_dir / "hangs").glob("*/report.txt"))
    if not reports or "suspect: rank 1 " not in reports[0].read_text(encoding="utf-8"):
        raise DrillError("no report in RUN/hangs names rank 1")
    if took > limit:
        raise DrillError(f"the watchdog took {took:.1f} s, not {limit:g}")
    return codes


def break_by_dropped_packets(job: DrillJob) -> list[int]:
    """Use an MLflow server that never answers; the job must continue and keep all points for later."""
    with _silent_server() as port:
        last = _BREAK_AT + _RESUMED_STEPS
        job.start(
            *("tracking.mlflow=true", f"tracking.uri=http://127.0.0.1:{port}", f"train.steps={last}"),
            **{"MLFLOW_RUN_ID": "", "no_proxy": "127.0.0.1"},
        )
        job.wait_for_step(last)
        began = time.monotonic()
        codes = expect_codes(job, [EXIT_DONE] * RANKS)
        took = time.monotonic() - began
    kept = sum("loss" in point.metrics for point in read_points(job.run_dir / METRICS_FILE))
    if kept != last:
        raise DrillError(f"{kept} of {last} points are kept for MLflow")
    if took > _MLFLOW_SECONDS:
        raise DrillError(f"the end took {took:.1f} s with a server that drops packets")
    return codes


@contextmanager
def _silent_server() -> Iterator[int]:
    """Provide a local port that drops packets, because its queue is full and nothing accepts connections."""
    callers: list[socket.socket] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        try:
            for _ in range(4):
                caller = socket.socket()
                caller.setblocking(False)
                caller.connect_ex(server.getsockname())
                callers.append(caller)
            yield int(server.getsockname()[1])
        finally:
            for caller in callers:
                caller.close()


FAULTS: dict[str, Callable[[DrillJob], list[int]]] = {
    "signal to one rank": break_by_signal,
    "RUN/STOP": break_by_file,
    "the clock": break_by_clock,
    "a rank killed": break_by_kill,
    "a rank stopped": break_by_stopped_rank,
    "MLflow drops packets": break_by_dropped_packets,
}


def expect_codes(job: DrillJob, expected: Sequence[int]) -> list[int]:
    codes = job.end()
    if codes != list(expected):
        raise DrillError(f"exit codes {_text(codes)}, expected {_text(expected)}: {job.last_error()}")
    return codes


def run(arguments: Sequence[str] = ()) -> int:
    """Break the job in every way and print a table; return the exit code, 0 only if the job survived all faults.

    Under a launcher the first rank runs the drill and starts separate ranks for it; the other ranks do nothing.

    Args:
        arguments: YAML files and overrides; the drill uses their memory and engine, and sets the sizes.
    """
    if not is_rank0():
        return EXIT_DONE
    folder = Path(tempfile.mkdtemp(prefix="dist_mem-drill-"))
    config = prepare(folder)
    load_config([*arguments, str(config)])  # a wrong argument would fail every job of the drill
    print(f"drill: {RANKS} ranks in {folder}", flush=True)
    print(_LINE.format("broken by", "exit codes", "checkpoint", "resumed to", "seconds", "survived"), flush=True)
    jobs: dict[str, DrillJob] = {}
    rows: list[Row] = []
    usual_start = 0.0
    for number, (name, fault) in enumerate(FAULTS.items()):
        job = jobs[name] = DrillJob(folder / f"{number + 1}", [*arguments, str(config)])
        job.usual_start = usual_start
        rows.append(_try(name, fault, job))
        print(rows[-1], flush=True)
        usual_start = usual_start or job.seconds_to_step
    differing = _compare(DrillJob(folder / "undisturbed", [*arguments, str(config)]), rows, jobs)
    for name, problem in differing.items():
        print(f"{name:<22} NO: {problem}")
    survived = sum(row.problem is None and row.name not in differing for row in rows)
    print(f"{survived} of {len(rows)} survived, with the losses of an undisturbed run")
    if survived == len(rows):
        shutil.rmtree(folder)
        return EXIT_DONE
    print(f"kept for inspection: {folder}")
    return EXIT_FAILED


def _try(name: str, fault: Callable[[DrillJob], list[int]], job: DrillJob) -> Row:
    """Break a job and resume it."""
    row, began = Row(name), time.monotonic()
    try:
        row.codes = _text(fault(job))
        step = job.newest_checkpoint()
        row.checkpoint = f"step {step}"
        job.kill()
        job.start(f"train.steps={step + _RESUMED_STEPS}")
        expect_codes(job, [EXIT_DONE] * RANKS)
        row.resumed = f"step {job.last_step()}"
        if list(job.losses()) != list(range(1, step + _RESUMED_STEPS + 1)):
            row.problem = "not every step has one loss"
    except (DrillError, ValueError, OSError) as error:
        row.problem = str(error)
    finally:
        job.kill()
    row.seconds = time.monotonic() - began
    return row


def _compare(undisturbed: DrillJob, rows: Sequence[Row], jobs: Mapping[str, DrillJob]) -> dict[str, str]:
    """Return, by name, how the losses of survived jobs differ from those of one uninterrupted job."""
    survived = [row.name for row in rows if row.problem is None]
    last = max((jobs[name].last_step() for name in survived), default=0)
    if last == 0:
        return {}
    try:
        undisturbed.start(f"train.steps={last}")
        expect_codes(undisturbed, [EXIT_DONE] * RANKS)
    except DrillError as error:
        return dict.fromkeys(survived, f"nothing to compare it with: {error}")
    finally:
        undisturbed.kill()
    right = undisturbed.losses()
    wrong = {name: [step for step, loss in jobs[name].losses().items() if loss != right.get(step)] for name in survived}
    return {name: f"its losses differ from step {steps[0]} on" for name, steps in wrong.items() if steps}


def _text(codes: Sequence[int]) -> str:
    return " ".join(map(str, codes))

"""Training under a real Slurm of two nodes: signals, time limit, kills and requeues; nothing is lost in any."""

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dist_mem.launch.script import render
from dist_mem.tracking.mlflow.client import connect
from tests.support.jobs import logged_steps, run_ranks, write_config
from tests.support.limits import wait_until
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_runs import BIN, ENDED, launch_block, path_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]  # minutes on a busy machine
OVER = {"kind": "transformer_xl", "mem_len": 16}
STICKY = {"kind": "infinite", "sampling": "sticky", "num_basis": 16, "num_samples": 16, "over": OVER}


job_config = partial(write_config, memory=STICKY)


class Submitted(NamedTuple):
    """A job in the queue."""

    job: str
    run: Path
    folder: Path  # the job's

    def wait_for_step(self, slurm: Cluster, step: int) -> None:
        wait_until(
            lambda: max(logged_steps(self.run), default=0) >= step or slurm.state(self.job) in ENDED,
            f"step {step}",
            seconds=240,
        )
        assert max(logged_steps(self.run), default=0) >= step, self.log()

    def log(self) -> str:
        """What the batch script and the ranks have said."""
        paths = [*sorted(self.folder.glob("trial-*.log")), *sorted(self.run.glob("slurm/*/*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in paths)


def submit(slurm: Cluster, folder: Path, books: Path, *changes: dict[str, Any], **launch: Any) -> Submitted:
    """Submit a training in `folder / "run"`, from `folder / "slurm"`."""
    run, started = folder / "run", folder / "slurm"
    config = job_config(folder / "job.yaml", books, run, *changes)
    started.mkdir(exist_ok=True)
    (started / "job.sbatch").write_text(render(launch_block(**launch), job_name="trial"))
    job = slurm.submit(f"--chdir={started}", f"{started}/job.sbatch", str(config), **path_of(slurm))
    return Submitted(job, run, started)


def tracked_in(uri: str) -> dict[str, Any]:
    """The block of a job that logs every tenth step to MLflow."""
    return {"tracking": {"mlflow": True, "uri": uri, "system_metrics": False, "every": 10, "send": "always"}}


def finished_run(uri: str, submitted: Submitted, steps: int) -> Any:
    """The run of a job in MLflow, which must be finished and have each step once."""
    client, run_id = connect(uri), (submitted.run / "mlflow_run_id").read_text().strip()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == list(range(10, steps + 1, 10))
    return run


def pids_of_ranks(slurm: Cluster, job: str) -> dict[int, int]:
    """Process of each rank, by Slurm's variables in its environment; other tests have jobs of that number too."""
    found = {}
    for process in psutil.process_iter(["environ", "cmdline"]):
        facts, command = process.info["environ"] or {}, process.info["cmdline"] or []
        is_rank = "train" in command and command[1:2] != ["train"] and "SLURM_STEP_ID" in facts
        is_ours = (facts.get("SLURM_CONF"), facts.get("SLURM_JOB_ID")) == (slurm.environment["SLURM_CONF"], job)
        if is_ours and is_rank and "srun" not in command[0]:
            found[int(facts["SLURM_PROCID"])] = process.pid
    return found


def newest(run: Path) -> Path:
    return max(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))


def assert_as_uninterrupted(submitted: Submitted, folder: Path, books: Path, changes: dict[str, Any]) -> None:
    """A run of the same settings on two ranks, without Slurm, ends in the same checkpoint."""
    config = job_config(folder / "straight.yaml", books, folder / "straight", changes)
    codes, text = run_ranks(["train", str(config)], world_size=2, cwd=folder)
    assert codes == [0, 0], text
    left, right = newest(submitted.run), newest(folder / "straight")
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*.safetensors"))
    assert names and names == sorted(str(path.relative_to(right)) for path in right.rglob("*.safetensors"))
    for name in names:
        ours, theirs = load_file(left / name), load_file(right / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def one_signal(slurm: Cluster, rank: int, number: signal.Signals, submitted: Submitted) -> None:
    wait_until(lambda: rank in pids_of_ranks(slurm, submitted.job), "the rank's process")
    os.kill(pids_of_ranks(slurm, submitted.job)[rank], number)


@pytest.mark.core
def test_signal_to_one_rank_saves_requeues_and_ends_as_if_nothing_had_been(
    slurm: Cluster, books: Path, tmp_path: Path, sqlite_uri: str
) -> None:
    changes = {"train": {"steps": 100}, "checkpoint": {"every": None}}
    submitted = submit(slurm, tmp_path, books, changes, tracked_in(sqlite_uri))
    submitted.wait_for_step(slurm, 10)
    one_signal(slurm, 1, signal.SIGUSR2, submitted)
    assert slurm.wait_for_state(submitted.job, *ENDED) == "COMPLETED", submitted.log()
    assert slurm.facts(submitted.job)["Restarts"] == "1"
    assert submitted.log().count("requeued") == 1

    assert len(list((submitted.run / "checkpoints").glob("step-*"))) == 2, "one of the stop, one of the end"
    assert_as_uninterrupted(submitted, tmp_path, books, changes)

    tags = finished_run(sqlite_uri, submitted, 100).data.tags
    assert (tags["SLURM_JOB_ID"], tags["SLURM_RESTART_COUNT"]) == (submitted.job, "1")


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["sweep", "arena"])
def test_a_study_is_submitted_as_an_array_and_measured_afterwards(
    command: str, slurm: Cluster, books: Path, tmp_path: Path
) -> None:
    """A sweep; and an arena with its budget, in which a memory from outside the package takes part."""
    of_run = {"train": {"steps": 5 if command == "sweep" else None, "segments_per_update": 1}}
    write_config(tmp_path / "job.yaml", books, tmp_path / "unused", of_run)
    OmegaConf.save({"launch": launch_block(nodes="1")}, tmp_path / "site.yaml")
    memories = {"none": ["memory.kind=none"], "outside": [f"memory.kind={ROOT}/examples/averages.py:Averages"]}
    columns = {"dev": {"metric": "token_perplexity", "split": "validation"}}
    spec: dict[str, Any] = {"train": ["job.yaml"], "data": str(books), "rows": memories, "columns": columns}
    if command == "arena":
        spec |= {"budget": {"tokens": 5 * 8 * 16}, "seeds": [0, 1]}  # of 8 lanes and segments of 16, see write_config
    OmegaConf.save(spec, tmp_path / "a.yaml")
    given = ["env", f"--chdir={tmp_path}", str(BIN / "dist-mem"), command, "a.yaml", "eval.allow_code=true"]
    job = slurm.call(*given, "--out", "out", "--slurm", "site.yaml", **path_of(slurm)).splitlines()[-1]
    slurm.wait(lambda: not slurm.call("squeue", "--noheader", f"--job={job}", check=False), "the array", seconds=400)
    runs = [f"{name}-seed{seed}" for name in memories for seed in spec.get("seeds", [0])]
    assert [slurm.state(f"{job}_{task}") for task in range(1, len(runs) + 1)] == ["COMPLETED"] * len(runs)
    assert [logged_steps(tmp_path / "out" / "runs" / run)[-1] for run in runs] == [5] * len(runs)
    text = slurm.call(*given, "--out", "out", "--no-estimate", **path_of(slurm))
    assert (tmp_path / "out" / "table.csv").read_text().count("--split validation") == len(runs), text


@pytest.mark.nightly
def test_time_limit_is_met_with_a_save_and_a_requeue(slurm: Cluster, books: Path, tmp_path: Path) -> None:
    """The signal of --signal, from Slurm itself; the clock would come later."""
    changes = {"train": {"steps": 4000}, "checkpoint": {"every": None}, "tracking": {"every": 100}}
    submitted = submit(slurm, tmp_path, books, changes, time="0:01:00", signal_seconds=40)
    assert slurm.wait_for_state(submitted.job, *ENDED, seconds=900) == "COMPLETED", submitted.log()
    restarts = int(slurm.facts(submitted.job)["Restarts"])
    assert restarts >= 1 and submitted.log().count("requeued") == restarts
    assert submitted.log().count("by a signal (SIGUSR2") == restarts
    assert_as_uninterrupted(submitted, tmp_path, books, changes)


class Event(NamedTuple):
    """Something that happens to a job, and what is to come of it."""

    happen: Callable[[Cluster, Submitted], Any]
    state: str
    restarts: int


def node_down(slurm: Cluster, submitted: Submitted) -> None:
    slurm.call("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    slurm.wait(lambda: slurm.state(submitted.job) != "RUNNING", "the job to be taken off the node")
    slurm.call("scontrol", "update", "nodename=node2", "state=resume", check=False)  # or it has come back by itself


def preemption(slurm: Cluster, submitted: Submitted) -> None:
    wanted = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    slurm.submit(*wanted, "--wrap=sleep 2")
    slurm.wait(lambda: slurm.state(submitted.job) != "RUNNING", "the job to give way")


def of_slurm(*command: str) -> Callable[[Cluster, Submitted], Any]:
    return lambda slurm, submitted: slurm.call(*command, submitted.job)


def kill(rank: int) -> Callable[[Cluster, Submitted], Any]:
    return lambda slurm, submitted: one_signal(slurm, rank, signal.SIGKILL, submitted)


EVENTS = {
    "preemption": Event(preemption, "COMPLETED", 1),
    "scontrol requeue": Event(of_slurm("scontrol", "requeue"), "COMPLETED", 1),
    "scancel --signal=TERM": Event(of_slurm("scancel", "--signal=TERM"), "COMPLETED", 1),
    "scancel": Event(of_slurm("scancel"), "CANCELLED", 0),
    "kill -9 of rank 0": Event(kill(0), "COMPLETED", 1),
    "kill -9 of rank 1": Event(kill(1), "COMPLETED", 1),
    "node down": Event(node_down, "COMPLETED", 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVENTS)
def test_nothing_is_lost_whatever_happens(
    slurm: Cluster, books: Path, tmp_path: Path, sqlite_uri: str, name: str
) -> None:
    changes = {"train": {"steps": 600}, "checkpoint": {"every": 50}}
    submitted = submit(slurm, tmp_path, books, changes, tracked_in(sqlite_uri))
    submitted.wait_for_step(slurm, 120)
    event = EVENTS[name]
    event.happen(slurm, submitted)
    assert slurm.wait_for_state(submitted.job, *ENDED, seconds=400) == event.state, submitted.log()
    assert slurm.facts(submitted.job)["Restarts"] == str(event.restarts)
    if event.state == "CANCELLED":  # resubmitted, it continues
        slurm.wait(lambda: "Slurm itself is ending" in submitted.log(), "the script to end")
        assert newest(submitted.run).name > "step-00000119"
        second = submit(slurm, tmp_path, books, changes, tracked_in(sqlite_uri))
        assert slurm.wait_for_state(second.job, *ENDED, seconds=400) == "COMPLETED", second.log()
    assert_as_uninterrupted(submitted, tmp_path, books, changes)
    finished_run(sqlite_uri, submitted, 600)


@pytest.mark.nightly
def test_twenty_signals_to_a_random_rank_at_a_random_time(slurm: Cluster, books: Path, tmp_path: Path) -> None:
    """All ranks save the same step (a checkpoint is one vote of all), exactly one requeue a signal, no deadlock."""
    draw = random.Random(0)
    changes = {"train": {"steps": 100_000}, "checkpoint": {"every": None}}
    submitted = submit(slurm, tmp_path, books, changes)
    saved: list[int] = []
    for trial in range(20):
        done = max(logged_steps(submitted.run), default=0)
        submitted.wait_for_step(slurm, done + draw.randint(1, 60))
        number = draw.choice([signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
        one_signal(slurm, draw.randrange(2), number, submitted)
        slurm.wait(lambda: len(list((submitted.run / "checkpoints").glob("step-*"))) > len(saved), "the save")
        restarted = partial(lambda count: slurm.facts(submitted.job).get("Restarts") == str(count), trial + 1)
        slurm.wait(restarted, "the requeue", seconds=120)
        saved.append(int(newest(submitted.run).name.removeprefix("step-")))
    assert saved == sorted(set(saved)) and len(saved) == 20
    assert submitted.log().count("requeued") == 20
    print(f"steps saved: {saved}")
    slurm.call("scancel", submitted.job)
    slurm.wait_for_state(submitted.job, *ENDED)

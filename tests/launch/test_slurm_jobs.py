"""Training under a real Slurm of two nodes: signals, time limit, kills and requeues; nothing is lost in any."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dist_mem.config import load_config
from dist_mem.launch.script import render
from dist_mem.runtime.environment import extension_cache
from dist_mem.tracking.mlflow.client import connect
from tests.launch.test_slurm_script import ENDED, launch_block
from tests.support.jobs import logged_steps, run_ranks, write_config
from tests.support.limits import wait_until
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster

pytestmark = [pytest.mark.ranks, pytest.mark.slurm, pytest.mark.timeout(1800)]  # minutes on a busy machine
BIN = Path(sys.executable).parent
STICKY = {
    "kind": "infinite",
    "sampling": "sticky",
    "num_basis": 16,
    "num_samples": 16,
    "over": {"kind": "transformer_xl", "mem_len": 16},
}


def job_config(
    path: Path, books: Path, run: Path, *changes: dict[str, Any], memory: dict[str, Any] | None = None
) -> Path:
    """As `write_config`, with another memory in place of its own."""
    write_config(path, books, run, *changes)
    if memory is not None:
        config = OmegaConf.load(path)
        config.memory = memory
        OmegaConf.save(config, path)
    return path


class Submitted(NamedTuple):
    """A job in the queue."""

    job: str
    run: Path
    folder: Path  # the job's

    def wait_for_step(self, slurm: Cluster, step: int) -> None:
        """Until it has logged that step."""
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


def submit(
    slurm: Cluster, folder: Path, config: Path, *, environment: dict[str, str] | None = None, **launch: Any
) -> Submitted:
    folder.mkdir(exist_ok=True)
    (folder / "job.sbatch").write_text(render(launch_block(**launch), job_name="trial"))
    job = slurm.submit(
        f"--chdir={folder}", str(folder / "job.sbatch"), str(config), **path_of(slurm), **(environment or {})
    )
    return Submitted(job, Path(OmegaConf.load(config).run_dir), folder)


def path_of(slurm: Cluster) -> dict[str, str]:
    """The environment of sbatch: this installation, and where DeepSpeed's op is compiled already."""
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", str(extension_cache()))
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}  # of the submitting shell, which must not count
    return {**ranks, "PATH": f"{BIN}{os.pathsep}{slurm.environment['PATH']}", "TORCH_EXTENSIONS_DIR": compiled}


def pids_of_ranks(slurm: Cluster, job: str) -> dict[int, int]:
    """Process of each rank, by Slurm's variables in its environment; other tests have jobs of that number too."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        facts = dict(line.split("=", 1) for line in environment if "=" in line)
        is_rank = b"train" in command and command[1:2] != [b"train"] and "SLURM_STEP_ID" in facts
        is_ours = (facts.get("SLURM_CONF"), facts.get("SLURM_JOB_ID")) == (slurm.environment["SLURM_CONF"], job)
        if is_ours and is_rank and b"srun" not in command[0]:
            found[int(facts["SLURM_PROCID"])] = int(path.name)
    return found


def assert_same_checkpoint(left: Path, right: Path) -> None:
    names = sorted(str(path.relative_to(left)) for path in left.rglob("*.safetensors"))
    assert names and names == sorted(str(path.relative_to(right)) for path in right.rglob("*.safetensors"))
    for name in names:
        ours, theirs = load_file(left / name), load_file(right / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def newest(run: Path) -> Path:
    return max(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))


def one_signal(slurm: Cluster, rank: int, number: signal.Signals, submitted: Submitted) -> None:
    wait_until(lambda: rank in pids_of_ranks(slurm, submitted.job), "the rank's process")
    os.kill(pids_of_ranks(slurm, submitted.job)[rank], number)


def test_signal_to_one_rank_saves_requeues_and_ends_as_if_nothing_had_been(
    slurm: Cluster, books: Path, tmp_path: Path, sqlite_uri: str
) -> None:
    changes = {"train": {"steps": 100}, "checkpoint": {"every": None}}
    tracked = {"tracking": {"mlflow": True, "uri": sqlite_uri, "system_metrics": False, "every": 10, "send": "always"}}
    config = job_config(tmp_path / "job.yaml", books, tmp_path / "run", changes, tracked, memory=STICKY)
    submitted = submit(slurm, tmp_path / "slurm", config)
    submitted.wait_for_step(slurm, 10)
    one_signal(slurm, 1, signal.SIGUSR2, submitted)
    assert slurm.wait_for_state(submitted.job, *ENDED) == "COMPLETED", submitted.log()
    assert slurm.facts(submitted.job)["Restarts"] == "1"
    assert submitted.log().count("requeued") == 1

    straight = job_config(tmp_path / "straight.yaml", books, tmp_path / "straight", changes, memory=STICKY)
    codes, text = run_ranks(["train", str(straight)], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert len(list((submitted.run / "checkpoints").glob("step-*"))) == 2, "one of the stop, one of the end"
    assert_same_checkpoint(newest(submitted.run), newest(tmp_path / "straight"))

    client = connect(sqlite_uri)
    run_id = (submitted.run / "mlflow_run_id").read_text().strip()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == list(range(10, 101, 10))
    assert run.data.tags["SLURM_JOB_ID"] == submitted.job
    assert run.data.tags["SLURM_RESTART_COUNT"] == "1"


@pytest.mark.nightly
@pytest.mark.parametrize("restart", ["requeue", "resubmit"])
def test_edit_in_mid_run_does_not_enter_at_the_next_start(
    slurm: Cluster, books: Path, tmp_path: Path, restart: str
) -> None:
    """Neither of the package, nor of the YAML, nor of a memory in a file of its own."""
    shutil.copytree(ROOT / "dist_mem", tmp_path / "code" / "dist_mem", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples" / "averages.py", tmp_path / "mine.py")
    changes = {"train": {"steps": 100}, "checkpoint": {"every": None}}
    memory = {"kind": f"{tmp_path}/mine.py:Averages"}
    config = job_config(tmp_path / "job.yaml", books, tmp_path / "run", changes, memory=memory)
    code = {"PYTHONPATH": f"{tmp_path}/code"}
    submitted = submit(slurm, tmp_path / "slurm", config, environment=code, snapshot=True, restart=restart)
    submitted.wait_for_step(slurm, 10)
    for path in (tmp_path / "code" / "dist_mem" / "__main__.py", tmp_path / "mine.py"):
        path.write_text("raise SystemExit('an edit has entered')\n")
    config.write_text(f"run_dir: {tmp_path}/other\ntrain: {{steps: 7}}\n")
    one_signal(slurm, 1, signal.SIGUSR2, submitted)
    assert slurm.wait_for_state(submitted.job, *ENDED) == ("COMPLETED" if restart == "requeue" else "FAILED"), (
        submitted.log()
    )
    slurm.wait(lambda: not slurm.call("squeue", "--noheader"), "the job after it", seconds=180)
    assert logged_steps(submitted.run) == list(range(1, 101)), submitted.log()
    assert "an edit has entered" not in submitted.log()
    assert not (tmp_path / "other").exists()
    (copied,) = submitted.run.glob("slurm/*/snapshot")
    assert sorted(path.name for path in copied.iterdir()) == ["code", "files"]
    if restart == "requeue":
        assert not list(submitted.folder.glob(".dist_mem-*")), "the pointer goes with the job"


@pytest.mark.nightly
def test_array_trains_every_line_once_however_often_it_is_submitted(
    slurm: Cluster, books: Path, tmp_path: Path
) -> None:
    changes = {"train": {"steps": 20}, "launch": {"nodes": "1"}}
    config = write_config(tmp_path / "job.yaml", books, tmp_path / "unused", changes)
    lines = [
        f"{config} memory.kind={kind} train.seed={seed} name={kind}-{seed} 'run_dir={tmp_path}/runs/${{name}}'"
        for kind, seed in (("none", 0), ("none", 1), ("lamemo", 0))
    ]
    (tmp_path / "sweep.txt").write_text("\n".join(lines) + "\n")
    script = tmp_path / "job.sbatch"
    script.write_text(render(launch_block(nodes="1"), job_name="sweep"))

    def whole_array() -> None:
        arguments = ("--array=1-3", f"--chdir={tmp_path}", str(script), "sweep.txt")
        job = slurm.submit(*arguments, **path_of(slurm))
        slurm.wait(
            lambda: not slurm.call("squeue", "--noheader", f"--job={job}", check=False), "the array", seconds=240
        )
        states = [slurm.state(f"{job}_{task}") for task in range(1, 4)]
        logs = "\n".join(path.read_text() for path in tmp_path.glob("sweep-*.log"))
        assert states == ["COMPLETED"] * 3, logs

    whole_array()
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert all(logged_steps(run) == list(range(1, 21)) for run in runs)
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.glob("checkpoints/*/manifest.json")}
    whole_array()
    assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing was trained again"
    said = [path.read_text() for run in runs for path in run.glob("slurm/*/*.log")]
    assert sum("is finished: step 20 was the last one" in text for text in said) == 3


def test_sweep_is_submitted_as_an_array_and_measured_afterwards(slurm: Cluster, books: Path, tmp_path: Path) -> None:
    write_config(tmp_path / "job.yaml", books, tmp_path / "unused", {"train": {"steps": 5}})
    launch = launch_block(nodes="1")
    OmegaConf.save({"launch": launch}, tmp_path / "site.yaml")
    spec = {"train": ["job.yaml"], "grid": {"memory.kind": ["none", "causal"]}, "data": str(books), "columns": {}}
    spec["columns"] = {"dev": {"metric": "token_perplexity", "split": "validation"}}
    OmegaConf.save(spec, tmp_path / "kinds.yaml")
    sweep = ("env", f"--chdir={tmp_path}", str(BIN / "dist-mem"), "sweep", "kinds.yaml", "--out", "out")
    job = slurm.call(*sweep, "--slurm", "site.yaml", **path_of(slurm)).splitlines()[-1]
    slurm.wait(lambda: not slurm.call("squeue", "--noheader", f"--job={job}", check=False), "the array", seconds=240)
    assert [slurm.state(f"{job}_{task}") for task in (1, 2)] == ["COMPLETED"] * 2
    assert all(logged_steps(tmp_path / "out" / "runs" / f"kind{kind}-seed0")[-1] == 5 for kind in ("none", "causal"))
    text = slurm.call(*sweep, "--no-estimate", **path_of(slurm))
    assert (tmp_path / "out" / "table.csv").read_text().count("evaluated") == 2, text


@pytest.mark.nightly
def test_an_arena_is_submitted_with_its_budget_and_measured_afterwards(
    slurm: Cluster, books: Path, tmp_path: Path
) -> None:
    """A memory from outside the package takes part."""
    write_config(tmp_path / "job.yaml", books, tmp_path / "unused", {"train": {"segments_per_update": 1}})
    config = load_config([str(tmp_path / "job.yaml")]).train
    OmegaConf.save({"launch": launch_block(nodes="1")}, tmp_path / "site.yaml")
    memories = {"none": ["memory.kind=none"], "outside": [f"memory.kind={ROOT}/examples/averages.py:Averages"]}
    budget = {"tokens": 5 * config.global_batch_size * config.seg_len}
    spec = {"train": ["job.yaml"], "rows": memories, "budget": budget, "seeds": [0, 1], "data": str(books)}
    OmegaConf.save(
        {**spec, "columns": {"dev": {"metric": "token_perplexity", "split": "validation"}}}, tmp_path / "a.yaml"
    )
    arena = (
        "env",
        f"--chdir={tmp_path}",
        str(BIN / "dist-mem"),
        "arena",
        "a.yaml",
        "eval.allow_code=true",
        "--out",
        "out",
    )
    job = slurm.call(*arena, "--slurm", "site.yaml", **path_of(slurm)).splitlines()[-1]
    slurm.wait(lambda: not slurm.call("squeue", "--noheader", f"--job={job}", check=False), "the array", seconds=400)
    assert [slurm.state(f"{job}_{task}") for task in range(1, 5)] == ["COMPLETED"] * 4
    runs = [tmp_path / "out" / "runs" / f"{name}-seed{seed}" for name in memories for seed in (0, 1)]
    assert [logged_steps(run)[-1] for run in runs] == [5] * 4
    text = slurm.call(*arena, "--no-estimate", **path_of(slurm))
    assert (tmp_path / "out" / "table.csv").read_text().count("--split validation") == 4, text


@pytest.mark.nightly
def test_time_limit_is_met_with_a_save_and_a_requeue(slurm: Cluster, books: Path, tmp_path: Path) -> None:
    """The signal of --signal, from Slurm itself; the clock would come later."""
    changes = {"train": {"steps": 4000}, "checkpoint": {"every": None}, "tracking": {"every": 100}}
    config = job_config(tmp_path / "job.yaml", books, tmp_path / "run", changes, memory=STICKY)
    submitted = submit(slurm, tmp_path / "slurm", config, time="0:01:00", signal_seconds=40)
    assert slurm.wait_for_state(submitted.job, *ENDED, seconds=900) == "COMPLETED", submitted.log()
    restarts = int(slurm.facts(submitted.job)["Restarts"])
    assert restarts >= 1 and submitted.log().count("requeued") == restarts
    assert submitted.log().count("by a signal (SIGUSR2") == restarts
    straight = job_config(tmp_path / "straight.yaml", books, tmp_path / "straight", changes, memory=STICKY)
    codes, text = run_ranks(["train", str(straight)], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert_same_checkpoint(newest(submitted.run), newest(tmp_path / "straight"))


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


EVENTS = {
    "preemption": Event(preemption, "COMPLETED", 1),
    "scontrol requeue": Event(
        lambda slurm, submitted: slurm.call("scontrol", "requeue", submitted.job), "COMPLETED", 1
    ),
    "scancel --signal=TERM": Event(
        lambda slurm, submitted: slurm.call("scancel", "--signal=TERM", submitted.job), "COMPLETED", 1
    ),
    "scancel": Event(lambda slurm, submitted: slurm.call("scancel", submitted.job), "CANCELLED", 0),
    "kill -9 of rank 0": Event(
        lambda slurm, submitted: one_signal(slurm, 0, signal.SIGKILL, submitted), "COMPLETED", 1
    ),
    "kill -9 of rank 1": Event(
        lambda slurm, submitted: one_signal(slurm, 1, signal.SIGKILL, submitted), "COMPLETED", 1
    ),
    "node down": Event(node_down, "COMPLETED", 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVENTS)
def test_nothing_is_lost_whatever_happens(
    slurm: Cluster, books: Path, tmp_path: Path, sqlite_uri: str, name: str
) -> None:
    changes = {"train": {"steps": 600}, "checkpoint": {"every": 50}}
    tracked = {"tracking": {"mlflow": True, "uri": sqlite_uri, "system_metrics": False, "every": 10, "send": "always"}}
    config = job_config(tmp_path / "job.yaml", books, tmp_path / "run", changes, tracked, memory=STICKY)
    submitted = submit(slurm, tmp_path / "slurm", config)
    submitted.wait_for_step(slurm, 120)
    event = EVENTS[name]
    event.happen(slurm, submitted)
    assert slurm.wait_for_state(submitted.job, *ENDED, seconds=400) == event.state, submitted.log()
    assert slurm.facts(submitted.job)["Restarts"] == str(event.restarts)
    if event.state == "CANCELLED":  # resubmitted, it continues
        slurm.wait(lambda: "Slurm itself is ending" in submitted.log(), "the script to end")
        assert newest(submitted.run).name > "step-00000119"
        second = submit(slurm, tmp_path / "slurm", config)
        assert slurm.wait_for_state(second.job, *ENDED, seconds=400) == "COMPLETED", second.log()
    straight = job_config(tmp_path / "straight.yaml", books, tmp_path / "straight", changes, memory=STICKY)
    codes, text = run_ranks(["train", str(straight)], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert_same_checkpoint(newest(submitted.run), newest(tmp_path / "straight"))
    client, run_id = connect(sqlite_uri), (submitted.run / "mlflow_run_id").read_text().strip()
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == list(range(10, 601, 10))


@pytest.mark.nightly
def test_twenty_signals_to_a_random_rank_at_a_random_time(slurm: Cluster, books: Path, tmp_path: Path) -> None:
    """All ranks save the same step (a checkpoint is one vote of all), exactly one requeue a signal, no deadlock."""
    draw = random.Random(0)
    changes = {"train": {"steps": 100_000}, "checkpoint": {"every": None}}
    config = job_config(tmp_path / "job.yaml", books, tmp_path / "run", changes, memory=STICKY)
    submitted = submit(slurm, tmp_path / "slurm", config)
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

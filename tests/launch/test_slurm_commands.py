"""`dist-mem launch`, `status`, `logs` and `cancel` under a real Slurm of two nodes, with real trainings."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.support.jobs import logged_steps, write_config
from tests.support.limits import limit
from tests.support.messages import said
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_runs import path_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
LAUNCH = {"gpus_per_node": "0", "tasks_per_node": 2, "time": "0:20:00"}


class Run(NamedTuple):
    """A training that is submitted from its own folder, with its own copy of the code."""

    slurm: Cluster
    folder: Path

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    def call(self, *arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
        """stdout and stderr of `dist-mem ARGUMENTS`, which must end with that code."""
        own = {**path_of(self.slurm), "PYTHONPATH": f"{self.folder}/code"}
        variables = {**self.slurm.environment, **own, **environment}
        command = [sys.executable, "-m", "dist_mem", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=limit(300), check=False
        )
        print(f"$ dist-mem {' '.join(arguments)}   # exit code {done.returncode}\n{done.stdout}{done.stderr}")
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def submit(self, *overrides: str) -> str:
        """Number of the job: all that `dist-mem launch` prints to stdout."""
        return self.call("launch", "job.yaml", *overrides)[0].removesuffix("\n")

    def status(self) -> dict[str, Any]:
        self.call("status", "run")
        return json.loads(self.call("status", "run", "--json")[0])

    def wait_for_step(self, step: int) -> None:
        self.slurm.wait(lambda: max(logged_steps(self.directory), default=0) >= step, f"step {step}", seconds=240)

    def log(self) -> str:
        paths = [*sorted(self.folder.glob("*.log")), *sorted(self.directory.glob("slurm/*/*.log"))]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in paths)


@pytest.fixture
def make_run(slurm: Cluster, books: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Prepares the folder of a run; a test that fails leaves no job behind."""

    def make(*, steps: int, **launch: Any) -> Run:
        shutil.copytree(ROOT / "dist_mem", tmp_path / "code" / "dist_mem", ignore=shutil.ignore_patterns("__pycache__"))
        changes = {"train": {"steps": steps}, "checkpoint": {"every": None}, "launch": {**LAUNCH, **launch}}
        write_config(tmp_path / "job.yaml", books, Path("run"), changes)
        return Run(slurm, tmp_path)

    yield make
    slurm.cancel_all()
    slurm.wait_for_all(seconds=60)


@pytest.fixture
def full(slurm: Cluster) -> Callable[[], None]:
    """Takes both nodes; returns what gives them back."""
    job = slurm.submit("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    slurm.wait_for_state(job, "RUNNING")

    def free() -> None:
        slurm.call("scancel", job)

    return free


def test_edits_while_queued_and_in_mid_run_do_not_enter(make_run: Callable[..., Run], full: Callable[[], None]) -> None:
    """Neither of the code, nor of a memory's file, nor of the YAML: the submission has copied all.

    Status and logs see each state.
    """
    run = make_run(steps=150)
    shutil.copy(ROOT / "examples" / "averages.py", run.folder / "mine.py")
    job = run.submit(f"memory={{kind: {run.folder}/mine.py:Averages}}")
    assert job.isdecimal()
    queued = run.status()
    assert (queued["state"], queued["jobs"][0]["number"], queued["step"]) == ("queued", job, None)
    assert queued["jobs"][0]["reason"]
    assert f"job {job} has no log yet" in run.call("logs", "run", code=2)[1]

    code = run.folder / "code" / "dist_mem"
    good = (code / "model.py").read_text()
    for path in (code / "model.py", run.folder / "mine.py"):
        path.write_text("raise SystemExit('an edit has entered')\n")
    text = (run.folder / "job.yaml").read_text()
    (run.folder / "job.yaml").write_text("run_dir: other\ntrain: {steps: 7}\n")
    full()
    run.wait_for_step(10)
    (code / "__init__.py").write_text("raise SystemExit('an edit has entered')\n")
    (run.folder / "job.yaml").write_text("run_dir: another\n")
    run.slurm.call("scancel", "--signal=USR2", job)
    run.slurm.wait(lambda: run.slurm.facts(job).get("Restarts") == "1", "the requeue", seconds=120)
    run.slurm.wait_for_all()
    assert logged_steps(run.directory) == list(range(1, 151)), run.log()
    assert "an edit has entered" not in run.log()
    assert not (run.folder / "other").exists() and not (run.folder / "another").exists()
    assert [path.name for path in run.directory.glob("slurm/*snapshot*")] == ["snapshot"]
    assert not list(run.directory.glob("slurm/*/snapshot")), "none of the first start"

    shutil.copy(ROOT / "dist_mem" / "__init__.py", code / "__init__.py")
    (code / "model.py").write_text(good)
    (run.folder / "job.yaml").write_text(text)
    ended = run.status()
    assert (ended["state"], ended["step"], ended["steps"]) == ("finished", 150, 150)
    assert ended["last_end"] == {"job": job, "exit_code": 0, "meaning": "done"}
    assert ended["checkpoint"]["step"] == 150
    logs = run.call("logs", "run", "-n", "3")[0]
    assert "the ranks have ended with exit code 0" in logs
    assert f"==> run/slurm/{job}/" in logs and "step 150/150" in logs
    assert f"the newest one, {job}, has ended" in run.call("cancel", "run", code=2)[1]


@pytest.mark.parametrize(
    "restart", ["requeue", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("resubmit", "chain"))]
)
def test_cancelled_job_saves_and_stays_cancelled(make_run: Callable[..., Run], restart: str) -> None:
    run = make_run(steps=100_000, restart=restart, chain=3)
    job = run.submit()
    run.wait_for_step(20)
    running = run.status()
    assert running["state"] == "running"
    assert running["jobs"][0]["nodes"].startswith("node") and running["jobs"][0]["since"].startswith("20")
    assert running["step"] >= 20 and running["steps"] == 100_000
    assert min(running[key] for key in ("loss", "tokens_per_second", "steps_per_second", "seconds_left")) > 0
    assert "step" in run.call("logs", "run")[0]
    printed = run.call("cancel", "run")[0]
    assert f"job {job}" in printed and "will not start again" in printed
    assert run.slurm.call("squeue", "--noheader") == ""
    steps = sorted(path.name for path in (run.directory / "checkpoints").glob("step-*"))
    assert len(steps) == 1, "it has saved where it stopped"
    stopped = run.status()
    assert stopped["state"] == "stopped"
    assert stopped["last_end"]["exit_code"] == 85
    assert run.log().count(": start ") == 1
    assert "not started again: cancelled" in run.log()
    last = max(logged_steps(run.directory))
    assert run.submit(f"train.steps={last + 5}", "launch.restart=requeue") != job, "a new job resumes"
    run.slurm.wait_for_all()
    assert max(logged_steps(run.directory)) == last + 5, run.log()


def test_copy_of_a_run_and_the_job_that_has_its_number_now_are_left_alone(make_run: Callable[..., Run]) -> None:
    """A copy is how people branch; and Slurm counts from 1 again when its state is lost."""
    run = make_run(steps=100_000)
    job = run.submit()
    run.wait_for_step(3)
    shutil.copytree(run.directory, run.folder / "copy")
    copied = json.loads(run.call("status", "copy", "--json")[0])
    assert (copied["state"], copied["jobs"], copied["process"]) == ("stopped", [], None)
    said(run.call("cancel", "copy", code=2)[1], f"job {job} belongs to run")
    assert "resume=" in run.call("train", "job.yaml", "run_dir=copy", code=1)[1]
    assert run.slurm.state(job) == "RUNNING"
    processes = [
        one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("SLURM_JOB_ID") == job
    ]
    assert len(processes) >= 2
    for process in processes:
        process.suspend()  # a run whose folder is away while it writes ends
    run.directory.rename(run.folder / "moved")
    assert json.loads(run.call("status", "moved", "--json")[0])["state"] == "running"
    (run.folder / "moved").rename(run.directory)
    for process in processes:
        process.resume()
    run.call("cancel", "run", "--now")
    assert run.slurm.call("squeue", "--noheader") == ""
    assert not list((run.directory / "checkpoints").glob("step-*")), "it saves nothing"

    other = run.slurm.submit(f"--output={run.folder}/other.log", "--wrap=echo of somebody else; sleep 600")
    run.slurm.wait(lambda: (run.folder / "other.log").exists(), "the other job")
    records = run.directory / "slurm" / "jobs"
    records.write_text(records.read_text().replace(f"{job} ", f"{other} "))
    assert (run.status()["state"], run.status()["jobs"]) == ("stopped", [])
    assert "of somebody else" not in run.call("logs", "run")[0]
    assert f"job {other} is now another one" in run.call("cancel", "run", "--now", code=2)[1]
    assert run.slurm.state(other) == "RUNNING"


def test_queued_job_is_cancelled_at_once(make_run: Callable[..., Run], full: Callable[[], None]) -> None:
    run = make_run(steps=10)
    job = run.submit()
    assert "queued" in run.call("cancel", "run")[0]
    assert run.slurm.state(job) == "CANCELLED"
    full()
    assert run.status()["state"] == "stopped"


@pytest.mark.nightly
def test_dependency_is_honoured_once(make_run: Callable[..., Run], slurm: Cluster) -> None:
    """The job waits for the one it depends on; its requeue does not wait again."""
    first = slurm.submit("--output=/dev/null", "--wrap=sleep 15")
    run = make_run(steps=100)
    job = run.submit(f"launch.dependency=afterok:{first}")
    waiting = run.status()
    assert (waiting["state"], waiting["jobs"][0]["reason"]) == ("queued", "Dependency")
    assert "dependency" not in (run.directory / "slurm" / "job.sbatch").read_text().partition("# ---- the job")[0]
    run.wait_for_step(10)
    assert slurm.state(first) == "COMPLETED"
    slurm.call("scancel", "--signal=USR2", job)
    slurm.wait(lambda: slurm.facts(job).get("Restarts") == "1", "the requeue", seconds=120)
    run.slurm.wait_for_all()
    assert max(logged_steps(run.directory)) == 100, run.log()


def test_refused_submission_leaves_no_snapshot(make_run: Callable[..., Run]) -> None:
    run = make_run(steps=10)
    printed, error = run.call("launch", "job.yaml", "--partition", "absent", code=2)
    assert printed == "" and "error: sbatch refuses run/slurm/job.sbatch" in error
    assert "invalid partition specified: absent" in error
    assert [path.name for path in (run.directory / "slurm").iterdir()] == ["job.sbatch"]


def test_controller_that_is_down_is_the_machines_fault(make_run: Callable[..., Run], slurm: Cluster) -> None:
    run = make_run(steps=10)
    (run.directory / "slurm").mkdir(parents=True)
    (run.directory / "slurm" / "jobs").write_text("1 tests\n")
    dead = run.folder / "slurm.conf"
    port = next(line for line in (slurm.folder / "slurm.conf").read_text().splitlines() if "SlurmctldPort" in line)
    text = (slurm.folder / "slurm.conf").read_text().replace(port, "SlurmctldPort=1")
    dead.write_text(f"{text}\nMessageTimeout=2\n")
    for command in ("status", "logs", "cancel"):
        said = run.call(command, "run", code=1, SLURM_CONF=os.fspath(dead))[1]
        assert "controller" in said and "try again" in said

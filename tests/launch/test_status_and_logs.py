"""`dist-mem status` of several runs and `dist-mem logs --follow`, with programs in place of Slurm's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.launch import logs, submit
from dist_mem.tracking.log import METRICS_FILE
from tests.support.messages import refused, said
from tests.support.tracked import log_points

pytestmark = pytest.mark.slurm

# squeue lists the lines of the file `queue`; scontrol knows only the name of the cluster.
SQUEUE = '#!/bin/sh\ncat "$(dirname "$0")/queue"\n'
SCONTROL = "#!/bin/sh\necho 'ClusterName = tests'\n"
RUNNING = "12|RUNNING|2026-01-02T03:04:05|node[1-2]|None\n"


GOODPUT = {"goodput/useful": 0.7, "goodput/repeated": 0.2, "goodput/down": 0.1, "goodput/seconds": 100.0}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of programs in front of PATH; its file `queue` has the jobs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    logs.queue.cluster.cache_clear()
    yield folder
    logs.queue.cluster.cache_clear()


def make_run(folder: Path, *, job: str | None = None, step: int | None = None, code: int | None = None) -> Path:
    """Write what a run leaves in its directory."""
    (folder / "slurm" / "12").mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 100}\n")
    if job is not None:
        (folder / "slurm" / "jobs").write_text(f"{job} tests\n")
    if step is not None:
        metrics = {"loss": 2.5, "tokens_per_second": 1000.0, "step_seconds": 0.5, "mfu": 0.42, **GOODPUT}
        log_points(folder / METRICS_FILE, [{"step": step, "time": 1.0, "metrics": metrics}])
    if code is not None:
        (folder / "slurm" / "12" / "exit_code").write_text(f"{code}\n")
    return folder


def test_status_shows_each_run_in_the_order_of_the_arguments(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(tmp_path / "stopped", step=40, code=85),
        make_run(tmp_path / "running", job="12", step=60),
        make_run(tmp_path / "new"),
    ]
    (slurm / "queue").write_text(RUNNING)
    assert main(["status", *map(str, runs), "--json"]) == EXIT_DONE
    states = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [state["run"] for state in states] == [str(run) for run in runs]
    assert [state["state"] for state in states] == ["stopped", "running", "stopped"]
    assert [state["step"] for state in states] == [40, 60, None]
    assert [state["seconds_left"] for state in states] == [30.0, 20.0, None]
    assert states[0]["last_end"]["exit_code"] == 85 and states[1]["jobs"][0]["number"] == "12"

    assert main(["status", *map(str, runs)]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == [str(run) for run in runs]
    assert sum("state" in line for line in lines) == 3
    assert sum("MFU 42.0%" in line for line in lines) == 2
    bar, others = (
        "[############################------------] useful 70.0% of 0:01:40",
        "repeated (lost to restarts) 20.0%",
    )
    assert [line.split(maxsplit=1) for line in lines if "goodput" in line] == [["goodput", bar]] * 2
    assert [line.strip() for line in lines if "repeated" in line] == [f"{others}, down (lost to restarts) 10.0%"] * 2
    assert "60 of 100" in "\n".join(lines) and "node[1-2]" in "\n".join(lines)


def test_status_refuses_a_folder_that_is_no_run_and_names_it(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", step=1)
    (tmp_path / "other").mkdir()
    assert main(["status", str(run), str(tmp_path / "other")]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    said(f"exit code 2: {printed.err}", tmp_path / "other")


def test_logs_follow_prints_new_text_until_the_job_has_ended(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines, each new line once, a log that appears later, and what is written while the job ends."""
    run = make_run(tmp_path / "run", job="12")
    output, node = tmp_path / "train-12.log", run / "slurm" / "12" / "node1-0.log"
    output.write_text("".join(f"line {number}\n" for number in range(1, 6)))
    (run / "slurm" / "12" / "output").symlink_to(output)
    (slurm / "queue").write_text(RUNNING)
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        assert waits < 100, "it does not end"
        if waits == 2:
            node.write_text("step 1\n")
        if waits == 3:
            with output.open("a") as file:
                file.write("the ranks have ended\n")
        if waits == 4:
            (slurm / "queue").write_text("")
            with node.open("a") as file:
                file.write("step 2\n")

    assert logs.run(run, num_lines=2, follow=True, sleep=sleep) == EXIT_DONE
    shown = capsys.readouterr().out
    assert shown == (
        f"==> {output} <==\nline 4\nline 5\n\n"
        f"\n==> {node} <==\nstep 1\n"
        f"\n==> {output} <==\nthe ranks have ended\n"
        f"\n==> {node} <==\nstep 2\n"
    )


def test_logs_follow_waits_for_a_queued_job(tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", job="12")
    (slurm / "queue").write_text("12|PENDING|N/A||Priority\n")
    with refused(UnusableError):
        logs.run(run, num_lines=2, follow=False)

    def sleep(seconds: float) -> None:
        (run / "slurm" / "12" / "node1-0.log").write_text("step 1\n")
        (run / "slurm" / "12" / "output").write_text("")
        (slurm / "queue").write_text("")

    assert logs.run(run, num_lines=2, follow=True, sleep=sleep) == EXIT_DONE
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("complaint", "error"),
    [
        ("Unable to contact slurm controller (connect failure)", UnfitError),
        ("Batch job submission failed: Socket timed out on send/recv operation", UnfitError),
        ("Batch job submission failed: Invalid account or account/partition combination specified", UnusableError),
        ("Batch job submission failed: Requested node configuration is not available", UnusableError),
        ("unrecognized option '--gress=gpu:4'", UnusableError),
        ("option '--mem' requires an argument", UnusableError),
    ],
)
def test_submission_that_may_succeed_later_is_exit_code_1(
    tmp_path: Path, slurm: Path, complaint: str, error: type[Exception]
) -> None:
    (slurm / "sbatch").write_text(f'#!/bin/sh\necho "sbatch: error: {complaint}" >&2\nexit 1\n')
    (slurm / "sbatch").chmod(0o755)
    config = load_config(["train.steps=1", f"run_dir={tmp_path}/run", "launch.snapshot=false"])
    with refused(error, complaint.partition("(")[0].strip()):
        submit.run(config, [], dry_run=False, make_snapshot=lambda folder: None)
    assert [path.name for path in (tmp_path / "run" / "slurm").iterdir()] == ["job.sbatch"]

"""`dist-mem status`, `logs` and `cancel` with programs in place of Slurm's: of several runs, and of jobs of others."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.launch import logs, submit
from dist_mem.launch.slurm import cluster
from dist_mem.tracking.log import METRICS_FILE
from tests.support.messages import refused, said
from tests.support.tracked import log_points

pytestmark = pytest.mark.slurm

# squeue lists the lines of the file `queue`, scontrol shows those of `facts` of any job; `calls` has all commands.
PROGRAMS = {
    "squeue": """case $* in *=gone*) echo 'no such cluster' >&2; exit 1 ;; *) cat "$here/queue" ;; esac""",
    "scontrol": """case $* in *config*) echo 'ClusterName = tests' ;; *) cat "$here/facts" ;; esac""",
    "scancel": ": >$here/queue",
    "sbatch": "exit 9",  # tests write their own
}
SUBMITTED = "2026-01-02T03:00:00"
RUNNING = f"12|RUNNING|2026-01-02T03:04:05|node[1-2]|None|{SUBMITTED}|demo\n"


GOODPUT = {"goodput/useful": 0.7, "goodput/repeated": 0.2, "goodput/down": 0.1, "goodput/seconds": 100.0}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of programs in front of PATH; its file `queue` has the jobs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nhere=$(dirname "$0")\necho "{name} $*" >>"$here/calls"\n{text}\n')
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    (folder / "facts").touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    cluster.cache_clear()
    yield folder
    cluster.cache_clear()


def make_run(folder: Path, *, job: str | None = None, step: int | None = None, code: int | None = None) -> Path:
    """Write what a run leaves in its directory."""
    (folder / "slurm" / "12").mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 100}\n")
    if job is not None:
        (folder / "slurm" / "jobs").write_text(f"{job} tests {SUBMITTED} demo {folder}\n")
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


def test_status_lists_the_runs_of_a_folder_one_a_line(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / "runs" / name, step=step) for name, step in (("a", 40), ("sweep/b", None))]
    make_run(runs[0] / "inner")  # is a part of that run
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["runs"]):
        assert main(["status", *arguments]) == EXIT_DONE
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split() == ["run", "state", "step", "loss", "left", "checkpoint"]
        assert [line.split()[:2] for line in lines] == [["runs/a", "stopped"], ["runs/sweep/b", "stopped"]]
        assert "40 of 100" in lines[0] and "2.5000" in lines[0]
    assert main(["status", "--json"]) == EXIT_DONE
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [40, None]


def test_run_that_cannot_be_shown_hides_no_other(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another cluster has a note; one with a file that cannot be read is an error after the others."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("config.yaml").touch()  # as `dist-mem init` makes one
    make_run(Path("runs/a"), step=40)
    make_run(Path("runs/b"), step=1)
    Path("runs/b/slurm/jobs").write_text("1 gone\n")
    Path("runs/b/config.yaml").write_text("")  # as a full disk may leave it
    make_run(tmp_path / "scratch" / "c")
    Path("runs/linked").symlink_to(tmp_path / "scratch" / "c")
    Path("runs/again").symlink_to("a")
    Path("runs/loop").symlink_to("../runs")
    for folder in (".", "runs"):
        assert main(["status", folder]) == EXIT_DONE
        lines = capsys.readouterr().out.splitlines()
        shown = [line.split()[:2] for line in lines[1:-1]]
        assert shown == [["runs/a", "stopped"], ["runs/b", "unknown"], ["runs/linked", "stopped"]]
        said(lines[-1], "runs/b", "job 1 is of the cluster 'gone'")
    assert main(["cancel", "runs/b"]) == EXIT_USAGE
    said(capsys.readouterr().err, "job 1 is of the cluster 'gone'")

    make_run(Path("runs/0"))
    Path("runs/0/slurm/12/exit_code").mkdir()
    assert main(["status", "runs", "--json"]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert [json.loads(line)["run"] for line in printed.out.splitlines()] == ["runs/a", "runs/b", "runs/linked"]
    said(printed.err, "runs/0/slurm/12/exit_code")


def test_status_refuses_a_folder_that_is_no_run_and_names_it(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", step=1)
    (tmp_path / "other").mkdir()
    assert main(["status", str(run), str(tmp_path / "other")]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    said(printed.err, tmp_path / "other")


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
            with output.open("ab") as file:
                file.write("the ranks of Gr\u00fcn".encode()[:-2])  # a letter is half written
        if waits == 4:
            with output.open("ab") as file:
                file.write("\u00fcn have ended\n".encode()[1:])
        if waits == 5:
            (slurm / "queue").write_text("")
            with node.open("a") as file:
                file.write("step 2\n")

    assert logs.run(run, num_lines=2, follow=True, sleep=sleep) == EXIT_DONE
    shown = capsys.readouterr().out
    assert shown == (
        f"==> {output} <==\nline 4\nline 5\n\n"
        f"\n==> {node} <==\nstep 1\n"
        f"\n==> {output} <==\nthe ranks of Gr\u00fcn have ended\n"
        f"\n==> {node} <==\nstep 2\n"
    )


def test_logs_show_the_report_of_a_hang_until_the_next_start(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", job="12")
    (run / "slurm" / "12" / "node1-0.log").write_text("step 1\n")
    (run / "hangs" / "1").mkdir(parents=True)
    (run / "starts.jsonl").touch()
    (run / "hangs" / "1" / "report.txt").write_text("hang: nothing has moved\n")
    assert logs.run(run, num_lines=2, follow=False) == EXIT_DONE
    assert "step 1\n" in (shown := capsys.readouterr().out) and "hang: nothing has moved" in shown
    os.utime(run / "starts.jsonl", (2**32, 2**32))
    assert logs.run(run, num_lines=2, follow=False) == EXIT_DONE
    assert "step 1\n" in (shown := capsys.readouterr().out) and "hang" not in shown


def test_logs_follow_waits_for_a_queued_job(tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", job="12")
    (slurm / "queue").write_text(f"12|PENDING|N/A||Priority|{SUBMITTED}|demo\n")
    with refused(UnusableError, run, "job 12 has no log yet"):
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
    config = load_config(["train.steps=1", f"run_dir={tmp_path}/run", "launch.snapshot=false"])
    with refused(error, complaint.partition("(")[0].strip()):
        submit.run(config, [], dry_run=False, make_snapshot=lambda folder: None)
    assert [path.name for path in (tmp_path / "run" / "slurm").iterdir()] == ["job.sbatch"]


def calls(slurm: Path, program: str) -> list[str]:
    """The options that a program was called with, a line for each call."""
    lines = (slurm / "calls").read_text().splitlines() if (slurm / "calls").exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{program} ")]


def states_of(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `dist-mem status` says of a run."""
    capsys.readouterr()
    assert main(["status", str(run)]) == main(["status", str(run), "--json"]) == EXIT_DONE
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# A record of job 12, and what Slurm has under this number now: a line of squeue, and facts of scontrol.
LATER = "2026-01-03T03:00:00"
OF_OTHERS = {
    "another submission": (f"12 tests {SUBMITTED} demo RUN", f"{LATER}|wrap", "Restarts=0"),
    "of the same name": (f"12 tests {SUBMITTED} demo RUN", f"{LATER}|demo", "Restarts=0"),
    "requeued": (f"12 tests {SUBMITTED} demo RUN", f"{LATER}|wrap", "Restarts=2"),
    "before this run": (f"12 tests {LATER} demo RUN", f"{SUBMITTED}|demo", "Restarts=1"),
    "an old record": ("12 tests", f"{SUBMITTED}|demo", "Command=/elsewhere/run/slurm/job.sbatch WorkDir=/"),
    "an old record, forgotten": ("12 tests", f"{SUBMITTED}|demo", ""),
}
OF_THE_RUN = {
    "as recorded": (f"12 tests {SUBMITTED} demo RUN", f"{SUBMITTED}|renamed", ""),
    "requeued": (f"12 tests {SUBMITTED} demo RUN", f"{LATER}|demo", "JobId=12 Restarts=1 X=Y"),
    "a task of an array": (f"1 tests {LATER} x RUN\n12_3 tests {SUBMITTED} demo RUN", f"{SUBMITTED}|demo", ""),
    "moved": (f"12 tests {SUBMITTED} demo /where/it/was", f"{SUBMITTED}|demo", ""),
    "an old record": ("12 tests", f"{SUBMITTED}|demo", "JobId=12 Command=RUN/slurm/job.sbatch a b WorkDir=/"),
}


def write_case(run: Path, slurm: Path, case: tuple[str, str, str]) -> None:
    record, listed, facts = (text.replace("RUN", str(run)) for text in case)
    (run / "slurm" / "jobs").write_text(f"{record}\n")
    number = "12_3" if "12_3" in record else "12"
    (slurm / "queue").write_text(f"{number}|RUNNING|2026-01-02T03:04:05|node[1-2]|None|{listed}\n")
    (run / "other.log").write_text("log of somebody else\n")
    (slurm / "facts").write_text(f"{facts} StdOut={run}/other.log\n")


@pytest.mark.parametrize("name", OF_OTHERS)
def test_job_that_only_has_the_number_is_neither_shown_nor_cancelled(
    name: str, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm counts from 1 again when its state is lost, and two clusters may have one name."""
    run = make_run(tmp_path / "run", step=1)
    write_case(run, slurm, OF_OTHERS[name])
    (run / "other.log").rename(tmp_path / "other.log")
    (slurm / "facts").write_text((slurm / "facts").read_text().replace("run/other.log", "other.log"))
    state = states_of(run, capsys)
    assert (state["state"], state["jobs"], len(state["other_jobs"])) == ("stopped", [], 1)
    assert main(["logs", str(run)]) == EXIT_USAGE
    for options in ([], ["--now"]):
        capsys.readouterr()
        assert main(["cancel", str(run), *options]) == EXIT_USAGE
        said(capsys.readouterr().err, "job 12")
    assert calls(slurm, "scancel") == [] and not (run / "slurm" / "cancelled").exists()


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_job_of_the_run_is_shown_and_cancelled(
    name: str, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", step=1)
    write_case(run, slurm, OF_THE_RUN[name])
    state = states_of(run, capsys)
    number = "12_3" if "array" in name else "12"
    assert (state["state"], [job["number"] for job in state["jobs"]], state["other_jobs"]) == ("running", [number], [])
    assert main(["logs", str(run)]) == EXIT_DONE
    assert main(["cancel", str(run)]) == EXIT_DONE
    assert calls(slurm, "scancel") == [f"--signal=USR2 {number}"]
    submitted = OF_THE_RUN[name][1].partition("|")[0]
    assert (run / "slurm" / "cancelled").read_text() == f"{number} tests {submitted}\n"


@pytest.mark.parametrize(("signalled", "kept"), [(0, ""), (1, f"12 tests {SUBMITTED}\n")])
def test_cancel_that_fails_marks_only_the_jobs_that_it_has_signalled(
    signalled: int, kept: str, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the job would train on, and not start again at its end."""
    run = make_run(tmp_path / "run", job="12")
    with (run / "slurm" / "jobs").open("a") as file:
        file.write(f"13 tests {SUBMITTED} demo {run}\n")
    (slurm / "queue").write_text(RUNNING + RUNNING.replace("12", "13"))
    with (slurm / "scancel").open("a") as file:
        file.write(
            f'[ "$(grep -c scancel "$here/calls")" -le {signalled} ] || {{ echo "no controller" >&2; exit 1; }}\n'
        )
    assert main(["cancel", str(run)]) == EXIT_FAILED
    said(capsys.readouterr().err, "no controller")
    assert (run / "slurm" / "cancelled").read_text() == kept


def test_job_of_the_original_is_not_that_of_a_copy(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own jobs are; and the original stays itself under another name of its folder, and when it is moved."""
    run, copy = make_run(tmp_path / "live", step=1), tmp_path / "copy"
    write_case(run, slurm, OF_THE_RUN["as recorded"])
    shutil.copytree(run, copy)
    (tmp_path / "link").symlink_to(run)
    assert main(["cancel", str(copy)]) == EXIT_USAGE
    said(capsys.readouterr().err, "job 12", run)
    assert states_of(copy, capsys)["state"] == "stopped"
    assert states_of(tmp_path / "link", capsys)["state"] == states_of(run, capsys)["state"] == "running"
    assert calls(slurm, "scancel") == []
    with (copy / "slurm" / "jobs").open("a") as file:
        file.write(f"13 tests {LATER} demo {copy}\n")
    with (slurm / "queue").open("a") as file:
        file.write(f"13|RUNNING|2026-01-02T03:04:05|node1|None|{LATER}|demo\n")
    assert [job["number"] for job in states_of(copy, capsys)["jobs"]] == ["13"]
    assert main(["cancel", str(copy)]) == EXIT_DONE
    assert calls(slurm, "scancel") == ["--signal=USR2 13"]
    write_case(run, slurm, OF_THE_RUN["as recorded"])
    run.rename(tmp_path / "moved")
    assert states_of(tmp_path / "moved", capsys)["state"] == "running"


@pytest.mark.parametrize("answer", ["4711;other", "Account: 12 hours left\n4711;other\n8 nodes are free"])
def test_cluster_that_sbatch_names_is_recorded_and_asked(
    answer: str, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the sbatch of a site says more than `number;cluster`."""
    (slurm / "sbatch").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (slurm / "queue").write_text(f"4711|RUNNING|2026-01-02T03:04:05|node1|None|{SUBMITTED}|demo\n")
    config = load_config(["train.steps=1", f"run_dir={tmp_path}/run", "launch.snapshot=false"])
    assert submit.run(config, [], dry_run=False, make_snapshot=lambda folder: None) == EXIT_DONE
    assert capsys.readouterr().out == "4711\n"
    assert (tmp_path / "run" / "slurm" / "jobs").read_text() == f"4711 other {SUBMITTED} demo {tmp_path}/run\n"
    assert states_of(tmp_path / "run", capsys)["jobs"][0]["number"] == "4711"
    assert main(["cancel", str(tmp_path / "run")]) == EXIT_DONE
    asked = [*calls(slurm, "squeue"), *calls(slurm, "scancel")]
    assert asked and all("--clusters=other" in options for options in asked)


def test_an_answer_of_sbatch_without_a_number_is_an_error_and_leaves_what_the_job_runs(
    tmp_path: Path, slurm: Path
) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 12 hours left\n")
    config = load_config(["train.steps=1", f"run_dir={tmp_path}/run"])
    with refused(UnfitError, "job.sbatch", "12 hours left"):
        submit.run(config, [], dry_run=False, make_snapshot=Path.mkdir)
    assert (tmp_path / "run" / "slurm" / "snapshot").is_dir()


@pytest.mark.parametrize("excludes", [True, False])
def test_submission_leaves_out_nodes_that_failed_beside_the_site_s(
    excludes: bool, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text('#!/bin/sh\necho "sbatch $*" >>"$(dirname "$0")/calls"\necho 12\n')
    failed = tmp_path / "run" / "slurm" / "failed_nodes"
    failed.parent.mkdir(parents=True)
    failed.write_text("node2\nnode7\nnode2\n")
    failed.with_name("stalled").write_text("x\n" * 3)
    launch = [f"launch.exclude_failed={str(excludes).lower()}", "launch.directives=['-x node1']"]
    config = load_config(["train.steps=1", f"run_dir={tmp_path}/run", "launch.snapshot=false", *launch])
    assert submit.run(config, [], dry_run=False, make_snapshot=Path.mkdir) == EXIT_DONE
    assert ("--exclude=node2,node7,node1 " in calls(slurm, "sbatch")[0]) is excludes
    assert not failed.with_name("stalled").exists(), "its starts without a checkpoint count from here"
    printed = capsys.readouterr().err
    if excludes:
        said(printed, "node2, node7", failed)
    else:
        assert "node7" not in printed


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, make_loop], ids=["pipe", "folder", "loop"])
@pytest.mark.parametrize("name", ["slurm", "slurm/jobs", "slurm/cancelled", "slurm/12/exit_code", "slurm/12/a.log"])
def test_file_that_is_none_ends_no_command_but_by_its_name(
    name: str, make: Callable[[Path], None], tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is read by one command at least, which says so and ends with 2, and hangs in none."""
    run = make_run(tmp_path / "run", job="12", step=1)
    (slurm / "queue").write_text(RUNNING)
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    make(run / name)
    errors = ""
    for command in (["status"], ["logs"], ["cancel", "--now"]):
        capsys.readouterr()
        code = main([command[0], str(run), *command[1:]])
        captured = capsys.readouterr()
        assert code in (EXIT_DONE, EXIT_USAGE)
        if code == EXIT_USAGE:
            said(captured.err, run)
            errors += captured.err
    assert f"{run / name}: " in errors or name == "slurm"

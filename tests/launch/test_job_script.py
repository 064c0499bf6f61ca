"""One start of the batch script, with programs in place of Slurm's: what it is given, and what it gives on."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE
from dist_mem.launch.script import render
from tests.support.messages import said
from tests.support.slurm_runs import launch_block

# Each writes a line of what it was called with. The ranks write the folder $SAVES and end with $CODE, or do not start
# with NO_RANKS; sbatch answers with the file `answer`.
PROGRAMS = {
    "scontrol": 'case $2 in hostnames) echo localhost ;; *) echo "JobId=7 SubmitTime=now JobState=RUNNING X" ;; esac',
    "srun": 'printf "%s\\n" "$MASTER_ADDR" "${MASTER_PORT-none}" "${RANK-none}" >>srun; env >>srun; echo "$@" >>srun; '
    '[ -n "${NO_RANKS:-}" ] || echo "$CODE" >"$DIST_MEM_EXIT_CODE"; '
    '[ -z "${SAVES:-}" ] || mkdir "$SAVES"; exit "$CODE"',
    "sbatch": 'echo "$@" >>sbatch; cat answer',
    "scancel": 'echo "$@" >>scancel',
    "dist-mem": 'echo "$PWD/run"',
}
OF_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4"}


def start(
    folder: Path, given: Mapping[str, Any], code: int = 0, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run the script of a job; return its exit code, and what it printed."""
    (folder / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "job.sbatch").write_text(render(launch_block(**given), job_name="trial", arguments="a.yaml"))
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "CODE": str(code), **OF_JOB, **(more or {})}
    done = subprocess.run(["bash", "job.sbatch"], cwd=folder, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        ([], "localhost", "none"),
        (["MASTER_PORT=29500"], "localhost", "29500"),
        (["MASTER_ADDR=10.0.0.7", "MASTER_PORT=29500"], "10.0.0.7", "29500"),
    ],
)
def test_place_of_rank_0_is_the_site_s_or_slurms_and_never_the_submitting_shell_s(
    env: list[str], address: str, port: str, tmp_path: Path
) -> None:
    of_shell = {"MASTER_ADDR": "login1", "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "4"}
    code, text = start(tmp_path, {"env": env}, more=of_shell)
    assert code == 0, text
    assert (tmp_path / "srun").read_text().splitlines()[:3] == [address, port, "none"]


def test_names_that_are_not_set_are_empty_in_env_image_and_mounts(tmp_path: Path) -> None:
    env = ["LD_LIBRARY_PATH=/opt/x/lib:$NOT_SET"]
    code, text = start(tmp_path, {"env": env, "container": "pyxis", "image": "a$NOT_SET", "mounts": ["/b$NOT_SET"]})
    assert code == 0, text
    assert "\nLD_LIBRARY_PATH=/opt/x/lib:\n" in (tmp_path / "srun").read_text()


@pytest.mark.parametrize(
    ("answer", "number"),
    [("8\n", "8"), ("Account: 12 hours left\n8;other\nhave a nice day\n", "8"), ("12 hours\n", None)],
)
def test_resubmission_keeps_options_and_reads_the_number_among_other_lines(
    answer: str, number: str | None, tmp_path: Path
) -> None:
    """Options of the command line, which the script does not have."""
    (tmp_path / "answer").write_text(answer)
    kept = {"NTASKS_PER_NODE": "2", "GPUS_PER_NODE": "a100:2", "CPUS_PER_TASK": "6", "JOB_NAME": "mine"}
    variables = {f"SLURM_{name}": value for name, value in kept.items()}
    code, text = start(tmp_path, {"restart": "resubmit"}, EXIT_REQUEUE, variables)
    assert code == EXIT_REQUEUE
    options = (tmp_path / "sbatch").read_text().split()
    for option in ("--ntasks-per-node=2", "--gpus-per-node=a100:2", "--cpus-per-task=6", "--job-name=mine"):
        assert option in options
    numbers = [line.split()[0] for line in (tmp_path / "run" / "slurm" / "jobs").read_text().splitlines()]
    assert numbers == ["7", *([number] if number else [])], text
    said(text, f"resubmitted as job {number}" if number else "12 hours")
    assert "not resubmitted" not in text


@pytest.mark.parametrize("code", [0, 87])
def test_job_after_which_none_is_needed_cancels_the_rest_of_its_chain(code: int, tmp_path: Path) -> None:
    """After 87 another job has the run directory, and would lose it to them."""
    tasks = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "3"}
    assert start(tmp_path, {"restart": "chain"}, code, tasks)[0] == code
    assert (tmp_path / "scancel").read_text() == "--state=PENDING 7\n"


@pytest.mark.parametrize("code", [0, 2])
def test_srun_that_starts_no_rank_has_failed_and_its_chain_continues(code: int, tmp_path: Path) -> None:
    """Slurm 22.05 returns 0 where a node cannot open the log of a rank, and 2 where it lacks the program."""
    tasks = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "3", "NO_RANKS": "1"}
    assert start(tmp_path, {"restart": "chain"}, code, tasks)[0] == EXIT_FAILED
    assert not (tmp_path / "scancel").exists()


def test_percent_sign_in_the_name_of_a_run_is_no_pattern_of_srun(tmp_path: Path) -> None:
    folder = tmp_path / "top5%accuracy"
    folder.mkdir()
    assert start(folder, {})[0] == 0
    assert f"--output={tmp_path}/top5%%accuracy/run/slurm/7/%N-%n.log" in (folder / "srun").read_text().split()


def test_new_checkpoint_is_found_where_checkpoints_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    code, text = start(tmp_path, {}, EXIT_REQUEUE, {"SAVES": f"{tmp_path}/run/checkpoints/step-00000001"})
    assert code == EXIT_REQUEUE and not (tmp_path / "run" / "slurm" / "stalled").exists(), text


@pytest.mark.parametrize(
    ("noted", "counted"), [("7  now trial RUN\n", 3), ("6  now trial RUN\n77  now trial RUN\n", 1)]
)
def test_starts_without_progress_count_from_the_submission_on(noted: str, counted: int, tmp_path: Path) -> None:
    """A job that was submitted again, once its fault was removed, ended for good after its first preemption."""
    folder = tmp_path / "run" / "slurm"
    folder.mkdir(parents=True)
    (folder / "jobs").write_text(noted)
    (folder / "stalled").write_text("x\nx\n")
    code, text = start(tmp_path, {}, EXIT_REQUEUE)
    assert code == EXIT_REQUEUE and (folder / "stalled").read_text() == "x\n" * counted
    assert ("no new checkpoint in 3 starts" in text) is (counted == 3)


@pytest.mark.parametrize(("variables", "named"), [({"DIST_MEM_RESTART": "requeu"}, "'requeu'"), ({}, "run/STOP")])
def test_start_that_cannot_do_what_is_wanted_ends_before_its_ranks(
    variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    code, text = start(tmp_path, {}, more=variables)
    assert code == EXIT_USAGE
    said(text, named)
    assert not (tmp_path / "srun").exists()

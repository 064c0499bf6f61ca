"""`launch.setup`: the job ends at the first command that fails, and names it; and what a container does not see."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from tests.support.limits import limit
from tests.support.messages import said
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster

# What ends a job, and its exit code.
FAILING = {
    "module load cuda/99.9": 127,
    "source /no/such/conda.sh": 1,
    "false": 1,
    "f() { return 3; }; f": 3,
    "true && false": 1,
    "false && echo skipped": 1,
    "false | cat": 1,
    "if true; then\n  false\nfi": 1,
    "(exit 9)": 9,
}
HARMLESS = [
    ["false || true"],
    ["f() { false; true; }", "f"],
    ["if false; then", "  echo no", "elif true; then", "  export A=1", "fi"],
    ["for a in 1 2; do", "  echo $a", "done"],
    ["cat <<END >/dev/null", "not closed: 'if", "END"],
    ["# if", "", "export A=\\", "1"],
    ["case a in", "  a) true ;;", "esac"],
    [". ./profile.sh"],  # its own commands may fail
    ["! false", "echo $unset"],
]


def site_part(
    setup: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> subprocess.CompletedProcess[str]:
    """Run what a script does for its site, and print a word at its end, if unset variables are errors again."""
    (folder / "site.yaml").write_text(json.dumps({"launch": {"setup": setup}}))
    (folder / "profile.sh").write_text("false\n[ -n x ]\n")
    assert main(["launch", "train.steps=1", f"{folder}/site.yaml", "--dry-run"]) == 0
    script = capsys.readouterr().out.partition("# ---- the job")[0] + "[[ $- = *u* ]] && echo reached\n"
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("command", FAILING)
def test_command_that_fails_ends_the_job_and_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = site_part(["true", *command.splitlines(), "touch later"], tmp_path, capsys)
    assert done.returncode == 2 and "reached" not in done.stdout and not (tmp_path / "later").exists()
    assert f"error: launch.setup: exit code {FAILING[command]} of: {command}" in done.stdout


@pytest.mark.parametrize("setup", HARMLESS, ids=lambda setup: setup[0])
def test_command_that_succeeds_in_the_end_does_not(
    setup: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of several lines, of which the first alone is no command."""
    done = site_part(setup, tmp_path, capsys)
    assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, ["reached"], "")


@pytest.mark.parametrize("setup", [["true", "if true; then"], ["fi"], ["echo 'a"], ["echo a \\"], ["echo $("]], ids=str)
def test_lines_that_the_shell_would_not_understand_are_refused_before_the_job(
    setup: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "train.steps=1", f"launch.setup={json.dumps(setup)}", "--dry-run"]) == 2
    said(capsys.readouterr().err, "launch.setup")


@pytest.mark.slurm
def test_failing_setup_ends_a_chain_and_logs_show_why(slurm: Cluster, tmp_path: Path) -> None:
    """Also where the errors of the job have a file of their own, and the run has logs of an earlier job."""
    site = {"setup": ["echo begun", "module load cuda/99.9"], "restart": "chain", "chain": 3, "snapshot": False}
    launch = {**site, "gpus_per_node": 0, "time": "0:10:00", "directives": [f"--error={tmp_path}/of-job.err"]}
    (tmp_path / "job.yaml").write_text(json.dumps({"train": {"steps": 1}, "preflight": False, "launch": launch}))
    (tmp_path / "run" / "slurm" / "1000").mkdir(parents=True)
    (tmp_path / "run" / "slurm" / "1000" / "node1-0.log").write_text("of an earlier job\n")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**slurm.environment, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "dist_mem", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit(120), check=False
        )

    job = call("launch", "job.yaml", "run_dir=run").stdout.strip()
    assert slurm.wait_for_state(f"{job}_1", "FAILED", "COMPLETED") == "FAILED"
    slurm.wait_for_all(seconds=60)
    assert slurm.facts(f"{job}_1")["ExitCode"] == "2:0"
    assert slurm.state(f"{job}_3") in ("CANCELLED", "gone")
    shown = call("logs", "run").stdout
    assert "begun" in shown and "module: command not found" in shown and "of an earlier job" not in shown
    (reason,) = re.findall("error: launch.setup.*", shown)
    said(reason, "module load cuda/99.9")


@pytest.mark.parametrize("container", ["apptainer", "pyxis"])
def test_paths_that_the_container_does_not_see_are_named(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOT_SET", raising=False)
    image = ["train.steps=1", f"launch.container={container}", "launch.image=./a.sif", "--dry-run"]
    paths = ["data.path=/data/books", "run_dir=/runs/x", "tracking.uri=sqlite:////db/mlflow.db"]

    def named(*given: str) -> list[str]:
        assert main(["launch", *image, *given]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "launch.mounts" in line]
        return [line.partition("warning: ")[2].partition(" = ")[0] for line in lines]

    keys = ["data.path", "tracking.uri", "run_dir"]
    assert sorted(named(*paths)) == sorted(keys)
    assert sorted(named(*paths, "launch.mounts=[/data]")) == ["run_dir", "tracking.uri"]
    assert sorted(named(*paths, "launch.mounts=['/a:/data:ro', /runs/x]")) == ["tracking.uri"]
    assert named("data.path=/scratch/me/books", "launch.mounts=[$SCRATCH]") == []
    assert named(*paths, "launch.mounts=[$NOT_SET]") == [], "only the nodes know"
    assert named("data.path=books", "run_dir=runs/x", f"data.cache={tmp_path}/cache") == []
    assert named("data.path=s3://books/data") == []
    assert named(*paths, "launch.directives=[--chdir=/data]") != []
    monkeypatch.setenv("SECRET", "/hidden")
    assert main(["launch", *image, "data.path=${oc.env:SECRET}/books"]) == 0
    assert "hidden" not in capsys.readouterr().err
    assert main(["launch", *image, "run_dir=/runs/x"]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if "run_dir" in line)
    said(line, "run_dir = /runs/x")


def test_data_of_a_container_are_looked_at_through_its_mounts(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is seen from here is checked; what only the container can have is a warning."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch, which is looked for after the data
    monkeypatch.setenv("BOOKS", str(books.parent))
    image = ["train.steps=1", f"run_dir={tmp_path}/run", "launch.container=pyxis", "launch.image=a.sif"]
    (tmp_path / "empty").mkdir()

    def refusal(path: str, mounts: str) -> str:
        assert main(["launch", *image, f"data.path={path}", f"launch.mounts=[{mounts}]"]) == 2
        return capsys.readouterr().err

    for mounts in ("$BOOKS:/data:ro", f"/nowhere:/data,'{books}:/data/{books.name}'"):
        printed = refusal(f"/data/{books.name}", mounts)
        assert "there is no sbatch" in printed and "data.path" not in printed
    printed = refusal("/data/absent", "$BOOKS:/data")
    assert "there is no sbatch" in printed
    said(printed, "warning: data.path")
    said(refusal("/data", f"{tmp_path}/empty:/data"), tmp_path / "empty" / "tokenizer.json")
    said(refusal("absent", "$BOOKS:/data"), "absent/tokenizer.json")

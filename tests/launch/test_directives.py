"""`launch.directives`: GPUs in every form that sbatch takes, and options that no job of a run can have."""

import itertools
import json
import re
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.config.launch_schema import LaunchConfig
from dist_mem.errors import UnusableError
from dist_mem.launch import directives
from dist_mem.launch.script import num_gpus
from dist_mem.launch.submit import submit_array
from tests.support.messages import refused, said
from tests.support.slurm_cluster import Cluster

GPUS = {
    "gpu": 1,
    "gpu:2": 2,
    "gpu:a100": 1,
    "gpu:a100:2": 2,
    "gpu:1g.5gb:3": 3,
    "gpu:a100:2(S:0,1)": 2,
    "gres:gpu:4": 4,
}
OTHERS = ("tmp:1G", "craynetwork:1")
# Each takes a list of resources to a directive.
FORMS = ("--gres={}", "--gres {}", '--gres="{}"', "--gres '{}'", "--gres={} # of each node", "  --gres={}  ")
REFUSED = [
    *(
        "--array=1-3",
        "-a 1-3",
        "-a1-3",
        "--arr=1-3",
        "-Ha 1-3",
        "--exclusive --array=1-3",
        "--test-only",
        "--wait",
        "-W",
    ),
    *("--wrap=reboot", "--parsable", "--no-kill", "-k", "--help", "--gre=gpu:2", "--tres-per-node=gres/gpu:4"),
    *(
        "--tres-per-task=gres/gpu:1",
        "--gpus-per-n=2",
        "-N 4",
        "-N4",
        "-dafterok:1",
        "--gres=gpu:2k",
        "--gres=gpu:two:many",
    ),
    *('--comment="open', "--nod=3", "", "a100", "--exclusive\n--array=1"),
]


def ranks(*given: str) -> int:
    assert list(directives.problems(given)) == []
    return num_gpus(LaunchConfig(directives=[*given]))


@pytest.mark.parametrize("form", FORMS)
def test_gpus_of_all_kinds_add_up_in_every_form(form: str) -> None:
    """Of one resource, of any two, and beside others."""
    for first, second in itertools.product(GPUS, [*GPUS, *OTHERS]):
        assert ranks(form.format(first)) == GPUS[first]
        assert ranks(form.format(f"{first},{second}")) == GPUS[first] + GPUS.get(second, 0)
        assert ranks(form.format(f"{second},{first}")) == GPUS[first] + GPUS.get(second, 0)
    assert all(ranks(form.format(other)) == 8 for other in OTHERS), "launch.gpus_per_node"


@pytest.mark.slurm
@pytest.mark.parametrize("form", FORMS)
def test_slurm_gives_a_node_the_gpus_that_are_counted(form: str, slurm: Cluster, tmp_path: Path) -> None:
    for resources in ("gpu", "gpu:2", "gpu:1,gpu:1"):
        directive = form.format(resources)
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n#SBATCH {directive}\ntrue\n")
        job = slurm.submit("--hold", "--output=/dev/null", str(tmp_path / "job.sh"))
        given = re.findall(r"gpu(?::(\d+))?", slurm.facts(job)["TresPerNode"])
        slurm.call("scancel", job)
        assert sum(int(number or 1) for number in given) == ranks(directive)


@pytest.mark.parametrize("directive", REFUSED)
def test_what_changes_the_job_is_refused_in_every_form_before_anything_is_submitted(
    directive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "train.steps=1", f"launch.directives=[{json.dumps(directive)}]", "--dry-run"]) == 2
    captured = capsys.readouterr()
    said(captured.err, f"launch.directives[0]: is {directive!r}")
    assert captured.out == ""


def test_an_option_is_given_once() -> None:
    assert [index for index, _ in directives.problems(["--gres=gpu:1", "-C a", "--constraint=b", "--gres gpu:2"])] == [
        3
    ]


def test_nodes_to_leave_out_are_written_as_a_resubmission_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("--exclude=n[1-2]", "--exclude n[1-2]", "-x n[1-2]", "-xn[1-2]"):
        assert main(["launch", "train.steps=1", f"launch.directives=[{json.dumps(form)}]", "--dry-run"]) == 0
        assert "\n#SBATCH --exclude=n[1-2]\n" in capsys.readouterr().out


@pytest.mark.parametrize("data", ["data.path=/data/books", "data.path=s3://books/data"])
def test_paths_that_another_folder_of_the_job_changes_are_refused(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("train: {steps: 1}\n")
    other = tmp_path / "other"
    other.mkdir()
    absolute = ["train.steps=1", data, "run_dir=/runs/x", f"launch.directives=[--chdir={other}]", "--dry-run"]
    assert main(["launch", *absolute]) == 0
    for given in ("data.path=books", "run_dir=x", "mine.yaml"):
        assert main(["launch", given, *(word for word in absolute if word.partition("=")[0] not in given)]) == 2
        said(capsys.readouterr().err, "--chdir", given.partition("=")[0], f"cd {other}")
    assert main(["launch", "mine.yaml", f"launch.directives=[--chdir={tmp_path}]", "--dry-run"]) == 0
    assert main(["launch", f"launch.directives=[--chdir={other}]", "--script"]) == 0, "its arguments come there"
    launch = LaunchConfig(directives=[f"--chdir={other}"])
    with refused(UnusableError, "--chdir"):
        submit_array(tmp_path / "runs.txt", launch, num_tasks=2, at_once=None, name="sweep", make_snapshot=Path.mkdir)

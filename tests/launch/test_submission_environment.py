"""A variable of sbatch precedes a line of the script: none may change a job that `dist-mem launch` submits."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dist_mem.runtime.slurm_variables import environment_of_sbatch, environment_of_slurm
from tests.support.limits import limit
from tests.support.messages import said_line
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster

# Those of `man sbatch`, each with a value that changes a job.
OPTIONS = {
    **{"ACCTG_FREQ": "10", "ARRAY_INX": "1-2", "BATCH": "x", "CONSTRAINT": "x", "CONTAINER": "/x"},
    **{"CORE_SPEC": "1", "CPUS_PER_GPU": "2", "DEBUG": "1", "DELAY_BOOT": "5", "DISTRIBUTION": "cyclic"},
    **{"ERROR": "x.err", "EXCLUSIVE": "", "EXPORT": "NONE", "GET_USER_ENV": "", "GPU_BIND": "none", "GPU_FREQ": "low"},
    **{"GPUS": "2", "GPUS_PER_NODE": "2", "GPUS_PER_TASK": "1", "GRES": "gpu:1", "GRES_FLAGS": "disable-binding"},
    **{"HINT": "nomultithread", "IGNORE_PBS": "", "INPUT": "/dev/zero", "JOB_NAME": "x", "MEM_BIND": "local"},
    **{"MEM_PER_CPU": "10", "MEM_PER_GPU": "10", "MEM_PER_NODE": "10", "NETWORK": "x", "NO_KILL": ""},
    **{"NO_REQUEUE": "1", "OPEN_MODE": "truncate", "OUTPUT": "x.out", "OVERCOMMIT": "", "POWER": "level"},
    **{"PROFILE": "all", "REQ_SWITCH": "1", "REQUEUE": "1", "SIGNAL": "KILL@1", "SPREAD_JOB": "", "THREAD_SPEC": "1"},
    **{"THREADS_PER_CORE": "1", "TIMELIMIT": "3", "USE_MIN_NODES": "", "WAIT": "", "WAIT_ALL_NODES": "1"},
    **{"WAIT4SWITCH": "1", "TRES_BIND": "x", "TRES_PER_TASK": "cpu=1", "SEGMENT": "1", "NEW_OPTION": "x"},
}
WHO_AND_WHERE = {"account": "x", "partition": "urgent", "qos": "x", "reservation": "x", "wckey": "x", "clusters": "x"}
ALL = {f"SBATCH_{name}": value for name, value in OPTIONS.items()}
# What no two jobs have in common.
OF_ITS_OWN = {
    "JobId",
    "Priority",
    "SubmitTime",
    "EligibleTime",
    "LastSchedEval",
    "AccrueTime",
    "StdOut",
    "StdErr",
    "WCKey",
}
# Of a job that `dist-mem launch` is called in, and of other commands of Slurm.
SURROUNDING = {
    **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SLURM_HINT": "compute_bound", "SLURM_EXIT_ERROR": "0"},
    **{"SLURM_GPUS": "1", "SLURM_TIME_FORMAT": "relative", "SRUN_CPUS_PER_TASK": "3", "SCONTROL_FUTURE": "1"},
    **{"SQUEUE_FORMAT": "%i", "SCANCEL_INTERACTIVE": "1", "SLURM_CLUSTERS": "x", "SALLOC_PARTITION": "x"},
}


WHO = {f"SBATCH_{option.upper()}": value for option, value in WHO_AND_WHERE.items()}


def of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a command of Slurm reads."""
    names = re.compile("S(LURM|BATCH|RUN|ALLOC|QUEUE|CANCEL|CONTROL|ACCT|INFO)_")
    return {name: value for name, value in environment.items() if names.match(name)}


@pytest.mark.parametrize("conf", ["/etc/slurm.conf", ""])
def test_only_who_pays_and_where_is_passed_on_and_only_what_the_configuration_leaves_open(
    conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leads to Slurm stays, unless it is set to empty, which is not set."""
    for name, value in {**ALL, **SURROUNDING, **WHO, "SLURM_CONF": conf}.items():
        monkeypatch.setenv(name, value)
    leads = {"SLURM_CONF": conf} if conf else {}
    for given in ({*WHO_AND_WHERE}, {"account", "qos"}, set[str]()):
        found = environment_of_sbatch(given)
        left_open = {f"SBATCH_{option.upper()}": "x" for option in WHO_AND_WHERE if option not in given}
        assert of_slurm(found.environment) == {**leads, **{name: WHO[name] for name in left_open}}
        assert set(found.passed_on.values()) == {*left_open}
        assert {*found.left_out} == {*ALL, *WHO} - {*left_open}
    assert of_slurm(environment_of_slurm()) == {**leads, "SLURM_TIME_FORMAT": "standard"}


def test_who_pays_is_not_passed_on_if_it_is_set_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WHO:
        monkeypatch.setenv(name, "")
    assert environment_of_sbatch(()).passed_on == {}
    assert not WHO.keys() & environment_of_sbatch(()).environment.keys()


@pytest.mark.slurm
def test_no_variable_changes_a_submitted_job(slurm: Cluster, tmp_path: Path) -> None:
    """The same facts of the job, but for what names it."""
    (tmp_path / "job.yaml").write_text(
        "train: {steps: 1}\npreflight: false\nrun_dir: run\nlaunch: {gpus_per_node: 0, time: '2:00:00', "
        "partition: debug, directives: [--hold]}\n"
    )

    def submitted(**environment: str) -> tuple[dict[str, str], str]:
        command = [sys.executable, "-m", "dist_mem", "launch", "job.yaml"]
        variables = {**slurm.environment, "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=limit(120), check=False
        )
        assert done.returncode == 0 and done.stdout.strip().isdecimal(), done.stdout + done.stderr
        facts = slurm.facts(done.stdout.strip())
        slurm.call("scancel", done.stdout.strip())
        return {name: value for name, value in facts.items() if name not in OF_ITS_OWN}, done.stderr

    straight, quiet = submitted()
    assert "SBATCH" not in quiet
    poisoned, lines = submitted(
        **ALL, **{**SURROUNDING, "SLURM_CONF": slurm.environment["SLURM_CONF"]}, SBATCH_WCKEY="w"
    )
    assert poisoned == straight
    assert all(name in lines for name in ALL), "it says what it leaves out"
    said_line(lines, "SBATCH_WCKEY")

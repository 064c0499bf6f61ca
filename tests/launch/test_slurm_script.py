"""The batch script under a real Slurm: what it does after its ranks have ended, for every way in which they can.

The ranks are a small shell script here in place of `dist-mem`; test_slurm_jobs.py trains.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_mem.launch.script import render
from tests.support.messages import said, said_line
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_runs import ENDED, launch_block

pytestmark = pytest.mark.slurm

# Its exit codes, one a start, are in a file; a new checkpoint comes with each `+`.
RANKS = """\
#!/bin/bash
[ "$2" != --snapshot ] || mkdir -p "$3/code"
if [ "$1" = config ]; then echo "$PWD/run"; exit "$(cat ../code 2>/dev/null || echo 0)"; fi
starts=starts${PER_TASK:+-$SLURM_ARRAY_TASK_ID}
if [ "$SLURM_PROCID" = 0 ]; then
  master=$MASTER_ADDR:${MASTER_PORT-of the step}
  when="$DIST_MEM_JOB_END|$(date +%s)"
  echo "$*|${SLURM_RESTART_COUNT:-0}|$SLURM_JOB_NODELIST|$master|$when|$SLURM_JOB_ID|$DIST_MEM_SNAPSHOT" >>$starts
  code=$(sed -n "$(wc -l <$starts)p" codes)
  [ "${code%+}" = "$code" ] || mkdir -p "run/checkpoints/step-$(printf %08d "$(wc -l <$starts)")"
  case $code in 1* | 86*) echo "$SLURMD_NODENAME" >>run/slurm/failed_nodes ;; esac # as preflight and watchdog do
  [ ! -e stops ] || touch run/STOP
  echo "error: why start $(wc -l <$starts) ended"
  [ "${code%+}" = 137 ] && kill -KILL $$
  echo "${code%+}" >"$DIST_MEM_EXIT_CODE"
  exit "${code%+}"
fi
for _ in $(seq 200); do [ -s "$DIST_MEM_EXIT_CODE" ] && exit "$(cat "$DIST_MEM_EXIT_CODE")"; sleep 0.05; done
"""
SAME = ("Partition", "TimeLimit", "JobName", "OverSubscribe", "NumNodes", "Requeue", "WorkDir")  # in a resubmission


# Functions, and a variable that a batch job does not have, as in the scripts of conda, which set -u would end.
CONDA = [
    'conda() { "__conda_$1" "$2"; }',
    '__conda_activate() { PS1="($1) $PS1"; export CONDA_DEFAULT_ENV=$1; }',
    'conda activate books && echo "activated $CONDA_DEFAULT_ENV"',
]


class Case(NamedTuple):
    """A job, and what is to come of it."""

    codes: str  # of its starts
    launch: Mapping[str, Any]
    num_starts: int
    state: str
    exit_code: int
    said: str


CASES = {
    "done": Case("0", {}, 1, "COMPLETED", 0, ""),
    "stopped, then done": Case("85+ 0", {}, 2, "COMPLETED", 0, "requeued"),
    "hung, then done": Case("86+ 0", {}, 2, "COMPLETED", 0, "requeued"),
    "killed, then done": Case("137+ 0", {}, 2, "COMPLETED", 0, "requeued"),
    "broken, then done": Case("1+ 0", {}, 2, "COMPLETED", 0, "requeued"),
    "wrong configuration": Case("2+ 0", {}, 1, "FAILED", 2, ""),
    "diverged": Case("3+ 0", {}, 1, "FAILED", 3, ""),
    "stopped, but there is STOP": Case("85+ 0", {}, 1, "FAILED", 85, "run/STOP is there"),
    "stopped without progress": Case("85 85 0", {"max_stalled": 2}, 2, "FAILED", 85, "no new checkpoint in 2 starts"),
    "without progress in between": Case(
        "85 85+ 85 0", {"max_stalled": 2, "restart": "resubmit"}, 4, "FAILED", 85, "resubmitted as job"
    ),
    "none": Case("85+ 0", {"restart": "none"}, 1, "FAILED", 85, "submit it again to resume"),
    "resubmit": Case("85+ 0", {"restart": "resubmit"}, 2, "FAILED", 85, "resubmitted as job"),
    "exclude": Case("86+ 0", {"exclude_failed": True, "nodes": "1"}, 2, "FAILED", 86, "resubmitted as job"),
    "unfit node": Case("1 0", {"exclude_failed": True, "nodes": "1"}, 2, "FAILED", 1, "resubmitted as job"),
    "exclude beside the site's": Case(
        "86+ 0",
        {"exclude_failed": True, "nodes": "1", "directives": ["--exclude=node1"]},
        *(1, "FAILED", 86, "request fewer nodes"),
    ),
    "chain": Case("85+ 0 0", {"restart": "chain", "chain": 3}, 2, "FAILED", 85, "the next job of the chain resumes"),
    "setup as conda's": Case("0", {"setup": CONDA}, 1, "COMPLETED", 0, "activated books"),
    "range of nodes": Case("0", {"nodes": "1-2"}, 1, "COMPLETED", 0, ""),
}


class Outcome(NamedTuple):
    """What came of a case."""

    job: str
    folder: Path
    state: str
    exit_code: str
    log: str
    starts: list[list[str]]


def write_ranks(folder: Path, codes: str, ranks: str = RANKS) -> None:
    folder.mkdir(parents=True)
    (folder / "dist-mem").write_text(ranks)
    (folder / "dist-mem").chmod(0o755)
    (folder / "codes").write_text(codes)
    (folder / "run" / "slurm").mkdir(parents=True)
    # What jobs of these numbers have left, as links and as marks of `dist-mem cancel`: of an earlier counter of Slurm
    # here, of another cluster, of another run.
    marks = [f"{number} tests{time}\n" for number in range(1, 200) for time in ("", " 2020-01-01T00:00:00")]
    (folder / "run" / "slurm" / "cancelled").write_text("".join(marks))
    for number in range(1, 200):
        for name in (f"{number}", f"{number}@tests@2020-01-01T00:00:00", f"{number}@other@2020-01-01T00:00:00"):
            (folder / f".dist_mem-{name}").symlink_to("/nowhere/slurm/1/snapshot")


def links_of(folder: Path, job: str) -> list[str]:
    """The links of a job and of its tasks, here."""
    names = [path.name for path in folder.glob(".dist_mem-*")]
    return [name for name in names if re.match(rf"\.dist_mem-{job}(_\d+)?@tests@", name)]


def submit(
    slurm: Cluster, folder: Path, codes: str, *options: str, stops: bool = False, ranks: str = RANKS, **launch: Any
) -> str:
    """Submit a job whose starts end with these codes."""
    write_ranks(folder, "\n".join(codes.split()) + "\n", ranks)
    if stops:
        (folder / "stops").touch()
    script = render(launch_block(**{"snapshot": True, **launch}), job_name="trial")
    return sbatch(slurm, folder, script, "a b.yaml", "x.y=[1, 2]", options=options)


def sbatch(
    slurm: Cluster, folder: Path, script: str, *arguments: str, options: Sequence[str] = (), **environment: str
) -> str:
    """Submit a script in a folder whose programs come first."""
    (folder / "job.sbatch").write_text(script)
    path = f"{folder}{os.pathsep}{slurm.environment['PATH']}"
    return slurm.submit(*options, f"--chdir={folder}", f"{folder}/job.sbatch", *arguments, PATH=path, **environment)


@pytest.fixture(scope="module")
def outcomes(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases, run side by side."""
    base = tmp_path_factory.mktemp("slurm")
    folders = {name: base / name.replace(" ", "_").replace(",", "") for name in CASES}
    jobs = {
        name: submit(slurm, folders[name], case.codes, stops="STOP" in case.said, **case.launch)
        for name, case in CASES.items()
    }
    slurm.wait_for_all()
    outcomes = {}
    for name, job in jobs.items():
        first = f"{job}_1" if CASES[name].launch.get("restart") == "chain" else job
        facts = slurm.facts(first)
        log = "".join(path.read_text() for path in sorted(folders[name].glob("trial-*.log")))
        starts = [line.split("|") for line in (folders[name] / "starts").read_text().splitlines()]
        outcomes[name] = Outcome(job, folders[name], facts["JobState"], facts["ExitCode"], log, starts)
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_exit_code_and_progress_decide_whether_it_starts_again(outcomes: dict[str, Outcome], name: str) -> None:
    case, outcome = CASES[name], outcomes[name]
    assert len(outcome.starts) == case.num_starts, outcome.log
    assert (outcome.state, outcome.exit_code) == (case.state, f"{case.exit_code}:0"), outcome.log
    assert case.said in outcome.log


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.codes != "0"])
def test_log_of_the_job_has_the_reason_of_every_end_once(outcomes: dict[str, Outcome], name: str) -> None:
    """What the ranks have said lies in files of their nodes; what earlier starts have said is not said again."""
    codes = CASES[name].codes.split()[: CASES[name].num_starts]
    for start, code in enumerate(codes, 1):
        assert outcomes[name].log.count(f"error: why start {start} ended") == (code != "0"), outcomes[name].log


def test_log_of_the_job_names_what_a_node_lacks(slurm: Cluster, tmp_path: Path) -> None:
    """The first node has nothing to say: its rank was ended because that of the second one had."""
    folder = tmp_path / "job"
    lacking = RANKS.replace("starts=", '[ "$SLURMD_NODENAME" = node1 ] || exec /absent/.venv/bin/python\nstarts=', 1)
    lacking = lacking.replace("  code=", "  sleep 60\n  code=", 1)
    job = submit(slurm, folder, "1", ranks=lacking, restart="none")
    slurm.wait_for_state(job, *ENDED)
    log = next(folder.glob("trial-*.log")).read_text()
    assert "/absent/.venv/bin/python: No such file or directory" in log
    shown = log.partition(f"== {folder}/run/slurm/{job}/")[2]
    assert "/absent" in shown.splitlines()[1], "first what has an error, and being ended is none"


def test_ranks_receive_their_arguments_rendezvous_address_and_end(outcomes: dict[str, Outcome]) -> None:
    arguments, restarts, nodes, master, end, now, *_ = outcomes["stopped, then done"].starts[1]
    assert arguments == "train a b.yaml x.y=[1, 2]"
    assert (restarts, nodes) == ("1", "node[1-2]")
    assert master == "127.0.0.1:of the step", "node1 has no name here: Slurm's address for it"
    assert 0 < int(end) - int(now) <= 1200


@pytest.mark.parametrize("name", CASES)
def test_all_starts_run_the_copy_of_the_first_and_no_link_of_a_job_is_left(
    outcomes: dict[str, Outcome], name: str
) -> None:
    """Numbers of jobs begin again: links of that number, of earlier jobs, are there when it starts."""
    outcome = outcomes[name]
    assert {start[-1] for start in outcome.starts} == {f"{outcome.folder}/run/slurm/{first_job(outcome)}/snapshot"}
    assert links_of(outcome.folder, outcome.job) == []


def first_job(outcome: Outcome) -> str:
    """The number by which Slurm counts the first start; of an array's task it is its own."""
    (number,) = (path.parent.name for path in (outcome.folder / "run" / "slurm").glob("*/snapshot"))
    return number


def test_resubmitted_job_waits_for_the_first_and_has_its_arguments(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["resubmit"].starts
    assert first[0] == second[0] == "train a b.yaml x.y=[1, 2]"
    assert first[1] == second[1] == "0", "another job, not a restart of the first"
    assert first[6] != second[6]


def test_no_variable_of_the_job_changes_its_resubmission(slurm: Cluster, tmp_path: Path) -> None:
    """sbatch would prefer those that begin with SBATCH_ to the script, and to what the job had."""
    env = [f"SBATCH_{name}" for name in ("PARTITION=urgent", "ARRAY_INX=1-2", "TIMELIMIT=3", "EXCLUSIVE=", "WAIT=")]
    job = submit(slurm, tmp_path / "job", "85+ 0", restart="resubmit", env=env)
    slurm.wait_for_all(seconds=120)
    numbers = [line.split("|")[6] for line in (tmp_path / "job" / "starts").read_text().splitlines()]
    assert numbers[0] == job and len(numbers) == 2
    first, second = ({name: slurm.facts(number)[name] for name in SAME} for number in numbers)
    assert first == second and first["Partition"] == "debug"


@pytest.mark.parametrize("name", ["exclude", "unfit node"])
def test_node_that_failed_is_left_out(outcomes: dict[str, Outcome], name: str) -> None:
    first, second = (start[2] for start in outcomes[name].starts)
    failed = (outcomes[name].folder / "run" / "slurm" / "failed_nodes").read_text().split()
    assert first in failed
    assert second not in failed


def test_range_of_nodes_survives_a_resubmission_without_an_unfit_node(slurm: Cluster, tmp_path: Path) -> None:
    asked = "--ntasks=2"  # it begins on both nodes
    job = submit(slurm, tmp_path / "job", "1 0", asked, exclude_failed=True, nodes="1-2")
    slurm.wait_for_state(job, *ENDED)
    slurm.wait_for_all(seconds=120)
    log = "".join(path.read_text() for path in sorted((tmp_path / "job").glob("trial-*.log")))
    starts = (tmp_path / "job" / "starts").read_text().splitlines()
    assert len(starts) == 2, log
    first, second = (line.split("|")[2] for line in starts)
    assert first == "node[1-2]"
    assert second in ("node1", "node2") and second not in (tmp_path / "job/run/slurm/failed_nodes").read_text(), log
    assert log.count("resubmitted") == 1 and slurm.facts(job)["ExitCode"] == "1:0"
    said_line(log, "resubmitted as job", "without node", "run/slurm/failed_nodes")


def test_refused_resubmission_is_reported_once_with_the_reason_and_at_once(slurm: Cluster, tmp_path: Path) -> None:
    """Two nodes of two, and one of them must be left out."""
    job = submit(slurm, tmp_path / "job", "1 0", exclude_failed=True, nodes="2")
    assert slurm.wait_for_state(job, *ENDED, seconds=60) == "FAILED"
    log = next((tmp_path / "job").glob("trial-*.log")).read_text()
    assert "resubmitted" not in log.replace("not resubmitted", "")
    assert log.count("Requested node configuration is not available") == 1, log
    assert "without node" in log and "not resubmitted" in log


def test_finished_run_cancels_the_rest_of_its_chain(slurm: Cluster, outcomes: dict[str, Outcome]) -> None:
    job = outcomes["chain"].job
    assert slurm.state(f"{job}_2") == "COMPLETED"
    assert "the rest of the chain is cancelled" in outcomes["chain"].log
    assert slurm.state(f"{job}_3") in ("CANCELLED", "gone")


@pytest.mark.parametrize(("code", "second"), [("2", "CANCELLED"), ("1", "FAILED"), ("255", "FAILED")])
def test_only_a_wrong_configuration_cancels_the_chain(slurm: Cluster, tmp_path: Path, code: str, second: str) -> None:
    """A disk, or a registry of images, that is down now may be there for the next job."""
    (tmp_path / "code").write_text(code)
    job = submit(slurm, tmp_path / "job", "0", restart="chain", chain=2)
    slurm.wait_for_all(seconds=120)
    assert not (tmp_path / "job" / "starts").exists(), "no rank is started"
    assert slurm.facts(f"{job}_1")["ExitCode"] == f"{code}:0"
    assert slurm.facts(f"{job}_2")["JobState"] == second


def test_snapshot_that_is_gone_is_named(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write_ranks(folder, "0\n")
    script = render(launch_block(), job_name="trial", snapshot=folder / "absent")
    job = sbatch(slurm, folder, script, "a.yaml")
    assert slurm.wait_for_state(job, *ENDED) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "2:0"
    (line,) = re.findall("error: .*", next(folder.glob("trial-*.log")).read_text())
    said(line, f"{folder}/absent")


def test_cancelled_job_does_not_come_back(slurm: Cluster, tmp_path: Path) -> None:
    """Its ranks save and end with 85, as always; but who cancels a job does not want it again."""
    folder = tmp_path / "job"
    job = submit(slurm, folder, "85+ 0")
    slow = RANKS.replace("  code=", '  trap "echo 85 >$DIST_MEM_EXIT_CODE; exit 85" TERM; sleep 60 & wait\n  code=')
    (folder / "dist-mem").write_text(slow)
    slurm.wait(lambda: (folder / "starts").exists(), "the ranks to start")
    slurm.call("scancel", job)
    assert slurm.wait_for_state(job, *ENDED) == "CANCELLED"
    slurm.wait(lambda: "Slurm itself is ending the job" in next(folder.glob("trial-*.log")).read_text(), "the script")
    time.sleep(1)  # a requeue would show
    assert slurm.facts(job)["Restarts"] == "0"
    assert slurm.state(job) == "CANCELLED"
    slurm.wait(lambda: links_of(folder, job) == [], "the link to go")


@pytest.mark.parametrize("restart", ["requeue", "resubmit"])
def test_tasks_of_an_array_start_again_each_for_itself(slurm: Cluster, tmp_path: Path, restart: str) -> None:
    """The number of the last task is also that of the whole array: it must not start, or wait for, the others."""
    folder = tmp_path / "job"
    write_ranks(folder, "85+\n0\n")
    (folder / "sweep.txt").write_text("one.yaml\n'two words.yaml' x=2\n")
    script = render(launch_block(restart=restart), job_name="sweep")
    sbatch(slurm, folder, script, "sweep.txt", options=["--array=1-2"], PER_TASK="-")
    slurm.wait_for_all(seconds=180)
    logs = "".join(path.read_text() for path in folder.glob("sweep-*.log"))
    for task, arguments in (("1", "train one.yaml"), ("2", "train two words.yaml x=2")):
        starts = (folder / f"starts-{task}").read_text().splitlines()
        assert [line.split("|")[0] for line in starts] == [arguments] * 2, logs
        assert all(line.split("|")[4] for line in starts), "each knows when its time is over"


@pytest.mark.nightly
def test_job_that_overran_its_time_starts_again(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm would let it go: what it takes off itself at the time limit it does not requeue."""
    folder = tmp_path / "job"
    job = submit(slurm, folder, "85+ 0", time="0:01:00", signal_seconds=5)
    deaf = RANKS.replace("  code=", '  [ "$(wc -l <$starts)" = 1 ] && { trap "" TERM USR2; sleep 200; }\n  code=')
    (folder / "dist-mem").write_text(deaf)
    slurm.wait(lambda: slurm.state(job) == "COMPLETED", "the second start to end", seconds=280)
    assert slurm.facts(job)["Restarts"] == "1"

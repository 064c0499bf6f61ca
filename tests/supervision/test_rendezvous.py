"""Ranks that do not come together: every command of several ranks names who is missing and ends, in plain words."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import dist_mem
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from dist_mem.runtime.limits import GOOD_OPEN_FILES
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.ranks import port_of_step
from dist_mem.supervision.rendezvous import open_store, wait_for_ranks
from tests.support.faults import PAGE
from tests.support.forked_ranks import Program
from tests.support.jobs import run_ranks, write_config
from tests.support.limits import limit
from tests.support.loopbacks import IPV6
from tests.support.messages import refused, said, said_line
from tests.support.ranks import launcher_environment

OF_TORCH = ("frame #", "Exception raised", "c10d", ".cpp:", "Traceback")  # its own words, of no use to anybody


class Ended(NamedTuple):
    code: int
    text: str


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, books: Path) -> Path:
    """Of a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    path = write_config(folder / "run.yaml", books, folder / "run", {"train": {"steps": 1}})
    assert run_ranks(["train", str(path)], world_size=1, cwd=folder)[0] == [EXIT_DONE]
    return path


def commands(config: Path) -> dict[str, list[str]]:
    """The commands of several ranks."""
    patience = "watchdog.join_seconds=2"
    run_dir = str(config.parent / "run")
    return {
        "train": ["train", str(config), patience],
        "unchecked": ["train", str(config), patience, "preflight=false"],
        "doctor": ["doctor", str(config), patience],
        "evaluate": ["evaluate", run_dir, patience],
        "inspect": ["inspect", run_dir, patience],
        "dialogue": ["dialogue", run_dir, patience],
    }


def test_every_module_whose_ranks_join_lets_them_meet_first() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in Path(dist_mem.__file__).parent.rglob("*.py")}
    joining = {path: text for path, text in sources.items() if "distributed.initialize(" in text}
    assert len(joining) >= 3
    assert [
        path for path, text in joining.items() if " wait_for_ranks(" not in text and " before_joining(" not in text
    ] == []


def alone(arguments: list[str], rank: int, *, cwd: Path, **changes: str) -> Ended:
    """One rank of two, each on a node of its own; of the commands, `train` starts a Python of its own."""
    environment = {**os.environ, **launcher_environment(rank, 2, free_port())}
    environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **changes}
    environment = {name: value for name, value in environment.items() if value != "unset"}
    if arguments[0] != "train":
        process = Program(arguments, cwd=cwd, environment=environment)
        text, _ = process.communicate(timeout=limit(60))
        return Ended(int(process.returncode or 0), text)
    command = [sys.executable, "-m", "dist_mem", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit(60), check=False
    )
    return Ended(done.returncode, done.stdout + done.stderr)


@pytest.mark.parametrize("command", ["train", "unchecked", "doctor", "evaluate", "inspect", "dialogue"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named_after_the_patience_and_torch_says_nothing(
    config: Path, command: str, rank: int
) -> None:
    code, text = alone(commands(config)[command], rank, cwd=config.parent)
    assert code == EXIT_FAILED, text
    come = "1 of 2 ranks have not come, and no other has for 2 s: 1", "nobody answers for 2 s, where rank 0 is expected"
    assert text.count(come[rank]) == 1, text
    said_line(text, come[rank])
    assert command != "train" or "error: the ranks have not come together:\n" in text
    assert come[rank].replace("2 s", "60 s") in PAGE
    assert not [word for word in OF_TORCH if word in text], text
    assert "preflight=false" not in text, "that would not help"


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_the_reason(config: Path, command: str, rank: int) -> None:
    code, text = alone(commands(config)[command], rank, cwd=config.parent, MASTER_ADDR="node1.invalid")
    assert code == EXIT_FAILED
    (shown,) = set(re.findall(r"node1\.invalid:\d+: .*?known\)", text))
    said(shown, "node1.invalid")
    assert not [word for word in OF_TORCH if word in text], text


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("evaluate", name) for name in ("WORLD_SIZE", "MASTER_ADDR")),
        *((command, "MASTER_PORT") for command in ("train", "doctor", "evaluate", "inspect", "dialogue")),
    ],
)
def test_half_of_a_launchers_variables_is_no_traceback(config: Path, command: str, name: str) -> None:
    code, text = alone(commands(config)[command], 0, cwd=config.parent, **{name: "unset"})
    assert code == EXIT_USAGE, text
    assert "environment: MASTER_PORT is not set" in PAGE
    assert f"environment: {name} is not set" in text and "Traceback" not in text


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_ranks_that_all_come_meet_without_a_word_of_torch(config: Path, command: str) -> None:
    arguments = [*commands(config)[command], "watchdog.join_seconds=60"]
    codes, text = run_ranks(arguments, world_size=2, cwd=config.parent)
    assert codes == [EXIT_DONE] * 2, text
    assert not [word for word in OF_TORCH if word in text], text


def test_ranks_may_open_many_files_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has a connection with every rank then: under the usual soft limit of 1024 only a few hundred can come."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        wait_for_ranks(seconds=1.0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(GOOD_OPEN_FILES, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("address", ["localhost", *IPV6, *(f"[{address}]" for address in IPV6)])
def test_ranks_train_at_an_address_of_either_family(tmp_path: Path, books: Path, address: str) -> None:
    """Public reports: pytorch#150533, miles#1636, slime#2151. Brackets are those of URLs."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 2}})
    codes, text = run_ranks(["train", str(config)], world_size=2, cwd=tmp_path, MASTER_ADDR=address)
    assert codes == [EXIT_DONE] * 2, text


# Slurm's variables of a rank: two steps of one job, jobs of near numbers, another cluster, a requeued job.
STEP = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "0"}
OTHERS = [
    {"SLURM_STEP_ID": "1"},
    {"SLURM_JOB_ID": "42"},
    {"SLURM_JOB_ID": "20041"},
    {"SLURM_CLUSTER_NAME": "b"},
    {"SLURM_RESTART_COUNT": "1"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_rank_does_not_join_another_job_at_its_port(other: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    exported = {"RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**STEP, **exported, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    first = open_store("127.0.0.1", port, rank=0, seconds=1.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert open_store("127.0.0.1", port, rank=1, seconds=1.0).check(["doctor/here"]), "one of its own does"
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    looks: list[float] = []
    with refused(OSError, "another job answers"):
        open_store("127.0.0.1", port, rank=1, seconds=0.2, check=lambda: looks.append(time.monotonic()))
    assert len(looks) < 10, "hundreds of ranks ask one store"
    assert first.num_keys() == 1


def test_the_steps_of_a_job_and_the_jobs_of_a_day_have_different_ports() -> None:
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(600, 1000) for step in range(16)]
    assert len({port_of_step(step) for step in steps}) == len(steps)
    assert all(10_000 <= port_of_step(step) < 30_000 for step in steps)

"""Where ranks come from, and how ranks agree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import EXIT_FAILED, UnfitError
from dist_mem.runtime import distributed, ranks
from dist_mem.runtime.distributed import Failure, World, agree_all_well, from_rank0, sum_over_ranks
from dist_mem.runtime.ranks import in_job_step, read_ranks
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal
from tests.support.messages import refused
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
JOB_STEP = {**BATCH_STEP, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TASK_3_OF_4 = {**JOB_STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        *(({}, (0, 1, 0, 1)), (BATCH_STEP, (0, 1, 0, 1))),
        *((TASK_3_OF_4, (3, 4, 1, 2)), (JOB_STEP | RANK_1_OF_2, (1, 2, 1, 2))),
    ],
)
def test_ranks_are_those_of_a_launcher_or_else_of_a_job_step_of_slurm(
    environ: dict[str, str], expected: tuple[int, ...]
) -> None:
    assert read_ranks(environ) == expected


@pytest.mark.parametrize("step", ["4294967291", "4294967290", "4294967292", "interactive", ""])
def test_batch_extern_and_interactive_steps_are_no_job_steps(step: str) -> None:
    assert not in_job_step({**JOB_STEP, "SLURM_STEP_ID": step})


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        *((RANK_1_OF_2, {name: text}) for name, text in zip(RANK_1_OF_2, ["", "-1", "two", "9" * 30], strict=True)),
        (TASK_3_OF_4, {"SLURM_PROCID": " "}),
        (TASK_3_OF_4, {"SLURM_NTASKS": "1.5"}),
        (TASK_3_OF_4, {"SLURM_LOCALID": "1_0"}),
        (TASK_3_OF_4, {"SLURM_STEP_TASKS_PER_NODE": "tcp://10.0.0.7:29500"}),
        *((RANK_1_OF_2, beyond) for beyond in ({"RANK": "2"}, {"LOCAL_RANK": "2"})),
    ],
)
def test_a_variable_of_a_launcher_that_is_no_number_or_beyond_the_last_is_refused_by_name(
    environ: dict[str, str], changed: dict[str, str]
) -> None:
    with refused(ValueError, *changed):
        read_ranks({**environ, **changed})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        *(({**RANK_1_OF_2, "WORLD_SIZE": size}, "RANK") for size in ("0", "1")),
    ],
)
def test_half_a_launcher_and_a_world_too_small_are_refused_by_the_other_name(
    environ: dict[str, str], name: str
) -> None:
    with refused(ValueError, name):
        read_ranks(environ)


def agreement(world: World) -> tuple[list[float], Any, str]:
    summed = sum_over_ranks([world.rank, 1.0], world.device)
    reported = from_rank0({"from": world.rank})
    error = OSError("disk full") if world.rank == 1 else None
    try:
        agree_all_well(error, "saving")
    except RuntimeError as caught:
        return summed, reported, str(caught)
    return summed, reported, ""


def test_one_failing_rank_fails_all_and_is_named(rank_pool: Callable[[int], RankPool]) -> None:
    for summed, reported, message in rank_pool(2).run(agreement):
        assert summed == [1.0, 2.0]
        assert reported == {"from": 0}
        assert message == "saving failed on 1 of 2 ranks. rank 1: OSError: disk full"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_stop_signal_is_noted_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopSignal()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert stop.received == number.name
    stop.restore()
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("numbers", [None, OF_SCHEDULERS, [signal.SIGINT, signal.SIGTERM]])
@pytest.mark.parametrize("at_start", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_stops_what_sigterm_stops_unless_it_was_ignored_at_the_start(
    numbers: Sequence[signal.Signals] | None, at_start: signal.Handlers
) -> None:
    """The signals are those of train, of evaluate and its like, and of generate; nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, at_start)
    try:
        with StopSignal() if numbers is None else StopSignal(numbers) as early:
            os.kill(os.getpid(), signal.SIGHUP)
            with StopSignal() as stop:
                os.kill(os.getpid(), signal.SIGHUP)
        expected = None if at_start == signal.SIG_IGN else "SIGHUP"
        assert (early.received, stop.received) == (expected, expected)
        assert signal.getsignal(signal.SIGHUP) == at_start
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_of_many_ranks_names_the_first_three(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [Failure(EXIT_FAILED, f"OSError: {rank}") for rank in range(512)]
    monkeypatch.setattr(distributed, "gather_objects", lambda value: failures)
    with refused(UnfitError, "rank 0", "rank 1", "rank 2"):
        agree_all_well(None, "saving")


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2", "SLURM_CPUS_PER_TASK": "5"}, 3),
        ({"SLURM_CPUS_PER_TASK": "5"}, 5),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None),  # torchrun's own default
        ({"OMP_NUM_THREADS": "all"}, None),
        ({}, None),
    ],
)
def test_allotted_threads_are_those_of_the_user_or_of_slurm(given: dict[str, str], threads: int | None) -> None:
    assert ranks.allotted_threads(given) == threads


def test_ranks_take_the_threads_they_are_allotted() -> None:
    """Without them a rank on a shared node would take the cores of others."""
    joined = "from dist_mem.runtime.distributed import initialize; initialize()"
    program = f"{joined}; import torch; print(torch.get_num_threads())"
    for variable in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**kept, variable: "7"}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "7", variable


def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset all variables of a launcher; monkeypatch restores those that the test sets."""
    exported = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_EXTENSIONS_DIR")
    for name in (*JOB_STEP, *exported, "SLURM_JOB_NODELIST", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_only_several_processes_need_a_port_which_slurm_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 0 would be another one on every rank."""
    without_launcher(monkeypatch)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with refused(ValueError):
        ranks.export_for_libraries(0, 2, 0, 2)
    with monkeypatch.context() as patch:
        for name, value in JOB_STEP.items():
            patch.setenv(name, value)
        ranks.export_for_libraries(0, 2, 0, 2)
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node1", "10007")
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.7:29500")
    with refused(ValueError):
        ranks.export_for_libraries(0, 2, 0, 2)
    ranks.export_for_libraries(0, 1, 0, 1)
    assert ranks.rendezvous_address() == ("127.0.0.1", 0)


def test_node_whose_name_does_not_resolve_is_met_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n[ \"$2\" = node ] && echo 'NodeName=n-0 NodeAddr=10.1.2.3 Port=1' || echo n-0.invalid\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    without_launcher(monkeypatch)
    for name, value in {**JOB_STEP, "SLURM_JOB_NODELIST": "n-0"}.items():
        monkeypatch.setenv(name, value)
    ranks.export_for_libraries(0, 2, 0, 2)
    assert os.environ["MASTER_ADDR"] == "10.1.2.3"

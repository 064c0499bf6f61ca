"""Where ranks come from, and one failure model: which error all ranks raise, for every error of one or two ranks."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.data.metadata import ShardError
from dist_mem.errors import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_REQUEUE,
    EXIT_TAKEN_OVER,
    EXIT_USAGE,
    CheckpointError,
    CutShortError,
    DivergedError,
    RunError,
    StoppedEarlyError,
    TakenOverError,
    UnfitError,
    UnusableError,
    run_error,
)
from dist_mem.runtime import ranks, rounds
from dist_mem.runtime.distributed import (
    RankFailure,
    World,
    agree_all_well,
    decide_on_rank0,
    gather_objects,
    on_all_ranks,
)
from dist_mem.runtime.ranks import read_ranks
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.ranks import Pools
from tests.support.scored_library import ALONE

BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
JOB_STEP = {**BATCH_STEP, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TASK_3_OF_4 = {**JOB_STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}


OTHER_STEPS = "4294967291", "4294967290", "4294967292", "interactive", ""  # batch, extern and interactive steps


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        (BATCH_STEP, (0, 1, 0, 1)),
        *((TASK_3_OF_4 | {"SLURM_STEP_ID": step}, (0, 1, 0, 1)) for step in OTHER_STEPS),
        (TASK_3_OF_4, (3, 4, 1, 2)),
        (JOB_STEP | RANK_1_OF_2, (1, 2, 1, 2)),
    ],
)
def test_ranks_are_those_of_a_launcher_or_else_of_a_job_step_of_slurm(
    environ: dict[str, str], expected: tuple[int, ...]
) -> None:
    assert read_ranks(environ) == expected


REFUSED = [  # a launcher's variables, and others in their place: no numbers, or beyond the last rank
    (RANK_1_OF_2, {"RANK": "", "WORLD_SIZE": "-1", "LOCAL_RANK": "two", "LOCAL_WORLD_SIZE": "9" * 30}),
    (TASK_3_OF_4, {"SLURM_PROCID": " ", "SLURM_NTASKS": "1.5", "SLURM_LOCALID": "1_0"}),
    (TASK_3_OF_4, {"SLURM_STEP_TASKS_PER_NODE": "tcp://10.0.0.7:29500"}),
    (RANK_1_OF_2, {"RANK": "2", "LOCAL_RANK": "2"}),
]


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((environ | {name: text}, name) for environ, wrong in REFUSED for name, text in wrong.items()),
        *((RANK_1_OF_2 | {"WORLD_SIZE": size}, "RANK") for size in ("0", "1")),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_variables_of_a_launcher_that_name_no_rank_are_refused_by_name(environ: dict[str, str], name: str) -> None:
    with refused(ValueError, name):
        read_ranks(environ)


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
    command = [sys.executable, "-c", f"{joined}; import torch; print(torch.get_num_threads())"]
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
    environment = {**kept, "SLURM_CPUS_PER_TASK": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


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
    with refused(ValueError, "MASTER_PORT is not set"):
        ranks.export_for_libraries(0, 2, 0, 2)
    with monkeypatch.context() as patch:
        for name, value in JOB_STEP.items():
            patch.setenv(name, value)
        ranks.export_for_libraries(0, 2, 0, 2)
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node1", "10007")
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.7:29500")
    with refused(ValueError, "MASTER_PORT is 'tcp://10.0.0.7:29500'"):
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


# Which error all ranks raise, and with which exit code.

# What another start may fix is never 2; what only a person can fix is never 1.
CODES: dict[Callable[[], Exception], int] = {
    lambda: UnusableError("model.d_model"): EXIT_USAGE,
    lambda: CheckpointError("step-00000005"): EXIT_USAGE,
    lambda: ShardError("document 3"): EXIT_USAGE,
    lambda: ValueError("a value"): EXIT_USAGE,
    lambda: FileNotFoundError(errno.ENOENT, "No such file", "index.json"): EXIT_USAGE,
    lambda: NotADirectoryError(errno.ENOTDIR, "Not a directory", "runs"): EXIT_USAGE,
    lambda: FileExistsError(errno.EEXIST, "File exists", "checkpoints"): EXIT_USAGE,
    lambda: PermissionError(errno.EACCES, "Permission denied", "runs"): EXIT_USAGE,
    lambda: OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"): EXIT_FAILED,
    lambda: OSError(errno.EDQUOT, "Disk quota exceeded", "metrics.jsonl"): EXIT_FAILED,
    lambda: OSError(errno.EIO, "Input/output error", "00000.tar"): EXIT_FAILED,
    lambda: OSError(errno.ESTALE, "Stale file handle", "00000.tar"): EXIT_FAILED,
    lambda: OSError(errno.EROFS, "Read-only file system", "lease.json"): EXIT_FAILED,  # a disk that has failed
    lambda: TimeoutError(errno.ETIMEDOUT, "Connection timed out"): EXIT_FAILED,
    lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"): EXIT_FAILED,
    lambda: OSError("without a number"): EXIT_FAILED,
    lambda: UnfitError("a node without a GPU"): EXIT_FAILED,
    lambda: TakenOverError("lease.json"): EXIT_TAKEN_OVER,
}


def test_every_error_has_the_code_of_its_kind() -> None:
    for make, code in CODES.items():
        assert run_error(make()).exit_code == code, repr(make())
    assert DivergedError("a loss", 3).exit_code == EXIT_DIVERGED
    assert {CutShortError("a signal").exit_code, StoppedEarlyError("SIGTERM").exit_code} == {EXIT_REQUEUE}


def outcome(work: Callable[[], object]) -> tuple[str, int | None, str]:
    """Type, exit code and text of the error that all ranks raise."""
    try:
        work()
    except RunError as error:
        assert error.is_agreed, "else every rank prints it"
        return type(error).__name__, error.exit_code, str(error)
    return "", None, ""


def fail(make: Callable[[], Exception] | None) -> None:
    if make is not None:
        raise make()


def outcomes_of_pairs(world: World) -> list[tuple[str, int | None, str]]:
    """For every pair of an error or none on rank 0 and an error or none on rank 1."""
    pairs = itertools.product([None, *CODES], repeat=2)
    return [outcome(partial(on_all_ranks, partial(fail, pair[world.rank]), "testing")) for pair in pairs]


def test_all_ranks_raise_the_same_code_whichever_failed(rank_pool: Pools) -> None:
    """Of two failures, the one that another start may fix decides: a chain of jobs then goes on."""
    results = rank_pool(2).run(outcomes_of_pairs)
    pairs = list(itertools.product([None, *CODES.values()], repeat=2))
    for pair, *raised in zip(pairs, *results, strict=True):
        codes = {code for code in pair if code is not None}
        expected = EXIT_TAKEN_OVER if EXIT_TAKEN_OVER in codes else min(codes, default=None)
        assert [code for _, code, _ in raised] == [expected] * 2, (pair, raised)
        assert len({kind for kind, _, _ in raised}) == 1, raised
        if pair[0] is None and pair[1] is not None:
            assert raised[0][2].startswith("testing failed on 1 of 2 ranks. rank 1: "), raised


def test_a_rank_alone_raises_its_own_error() -> None:
    """As a ShardError of a damaged document, which `score_split` promises to a notebook."""
    for error in [make() for make in CODES]:
        with pytest.raises(RunError) as raised:
            on_all_ranks(partial(_raise, error), "testing", gather=lambda value: [value])
        assert raised.value is error or not isinstance(error, RunError)


def _raise(error: Exception) -> None:
    raise error


def outcomes_of_rank_0(world: World) -> list[tuple[str, int | None, str]]:
    return [outcome(partial(decide_on_rank0, partial(fail, make))) for make in CODES]


def test_an_error_of_rank_0_is_raised_alike_on_all_ranks(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(outcomes_of_rank_0)
    assert first == second
    assert [code for _, code, _ in first] == list(CODES.values())


def test_an_error_of_many_ranks_names_the_first_three() -> None:
    failures = [RankFailure(EXIT_FAILED, f"OSError: {rank}") for rank in range(512)]
    with refused(UnfitError, "rank 0", "rank 1", "rank 2"):
        agree_all_well(None, "saving", gather=lambda value: failures)


def test_a_process_that_is_alone_needs_no_group() -> None:
    numbers = torch.rand(3)
    assert ALONE.gather(3) == [3] and torch.equal(ALONE.sum(numbers), numbers) and ALONE.agree(lambda: 4, "") == 4
    with pytest.raises(UnfitError, match="reading failed: OSError"):
        ALONE.agree(lambda: fail(lambda: OSError(errno.EIO, "disk")), "reading")


def meet_while_rank_1_works(world: World, *, fails: bool) -> tuple[str, bool]:
    """Result or error of a rank, and whether it was cancelled; rank 1 works until the ranks have met three times."""
    meetings, cancelled = threading.Semaphore(0), threading.Event()

    def gather(value: object) -> list[Any]:
        found = gather_objects(value)
        meetings.release()
        return found

    def work() -> str:
        if fails and world.rank == 0:
            raise ShardError("rank 0 has no tar")
        if fails:
            assert cancelled.wait(limit(60)), "rank 1 has not heard of the error"
        for _ in range(3 if world.rank == 1 and not fails else 0):
            assert meetings.acquire(timeout=limit(60)), "the ranks do not meet"
        return f"result {world.rank}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_SECONDS", 0.01)
        patch.setattr(rounds, "gather_objects", gather)
        try:
            return rounds.work_in_rounds(work, "working", cancel=cancelled.set), cancelled.is_set()
        except RunError as error:
            return str(error), cancelled.is_set()


def test_ranks_meet_while_one_of_them_still_works(rank_pool: Pools) -> None:
    """Else the wait of the others is limited by the timeout of a collective, and none hears an error of another."""
    assert rank_pool(2).run(partial(meet_while_rank_1_works, fails=False)) == [("result 0", False), ("result 1", False)]
    failed = rank_pool(2).run(partial(meet_while_rank_1_works, fails=True))
    assert [cancelled for _, cancelled in failed] == [True, True] and all("no tar" in text for text, _ in failed)

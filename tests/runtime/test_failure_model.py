"""One failure model: which error all ranks raise, and with which exit code, for every error of one or two ranks."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

import pytest

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
from dist_mem.runtime.distributed import World, decided_by_rank0, on_all_ranks
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

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


def codes_of_all(world: World) -> list[tuple[str, str, str]]:
    """The error that this rank raises, for every pair of an error on rank 0 and an error or none on rank 1."""
    found = []
    for first, second in itertools.product([None, *CODES], repeat=2):
        mine = (first, second)[world.rank]

        def work(mine: Callable[[], Exception] | None = mine) -> None:
            if mine is not None:
                raise mine()

        try:
            on_all_ranks(work, "testing")
        except RunError as error:
            found.append((type(error).__name__, str(error.exit_code), str(error)))
        else:
            found.append(("", "", ""))
    return found


def test_all_ranks_raise_the_same_code_whichever_failed(rank_pool: Callable[[int], RankPool]) -> None:
    """Of two failures, the one that another start may fix decides: a chain of jobs then goes on."""
    results = rank_pool(2).run(codes_of_all)
    pairs = list(itertools.product([None, *CODES.values()], repeat=2))
    for (first, second), *raised in zip(pairs, *results, strict=True):
        codes = {code for code in (first, second) if code is not None}
        expected = ""
        if codes:
            expected = str(EXIT_TAKEN_OVER if EXIT_TAKEN_OVER in codes else min(codes))
        assert [code for _, code, _ in raised] == [expected] * 2, (first, second, raised)
        assert len({kind for kind, _, _ in raised}) == 1, raised


def decisions_of_rank0(world: World) -> list[tuple[str, int, str]]:
    found = []
    for make in CODES:

        def decide(make: Callable[[], Exception] = make) -> None:
            raise make()

        with pytest.raises(RunError) as caught:
            decided_by_rank0(decide)
        found.append((type(caught.value).__name__, caught.value.exit_code, str(caught.value)))
    return found


def test_an_error_of_rank_0_is_raised_alike_on_all_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2).run(decisions_of_rank0)
    assert first == second
    assert [code for _, code, _ in first] == list(CODES.values())

"""The ranks of a job: how they start, agree, add up and end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dist_mem.errors import (
    EXIT_FAILED,
    EXIT_REQUEUE,
    EXIT_TAKEN_OVER,
    EXIT_USAGE,
    RunError,
    StoppedError,
    TakenOverError,
    UnfitError,
    UnusableError,
    run_error,
)
from dist_mem.runtime.compilers import find_own_tools
from dist_mem.runtime.devices import set_gpu_variables
from dist_mem.runtime.gpu import bind_to_gpu, set_arithmetic
from dist_mem.runtime.machine_memory import keep_heap
from dist_mem.runtime.ranks import allotted_threads, export_for_libraries, is_rank0, read_ranks, use_accelerator
from dist_mem.runtime.terminal import some

REPORTED = (RunError, ValueError, OSError)  # errors that ranks agree on; others are defects of the program
_SLOW = 2.0  # seconds after which a part of the start is announced

ResultT = TypeVar("ResultT")
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class World:
    """This process among all processes of the job. Its methods are collective, unless it is alone, as in a notebook."""

    rank: int
    size: int
    local_rank: int  # rank on this node
    local_size: int  # ranks on this node
    device: torch.device

    def gather(self, value: ResultT) -> list[ResultT]:
        """Return every rank's picklable value, in rank order."""
        return gather_objects(value) if self.size > 1 else [value]

    def agree(self, work: Callable[[], ResultT], what: str) -> ResultT:
        """Return the result of `work`, as `on_all_ranks`."""
        return on_all_ranks(work, what, gather=self.gather)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all ranks, on the CPU."""
        if self.size == 1:
            return tensor
        moved = tensor.to(self.device)
        dist.all_reduce(moved)
        return moved.cpu()


def choose_accelerator() -> None:
    """Select the CPU for DeepSpeed on a machine without a GPU; call this before DeepSpeed is imported.

    Otherwise DeepSpeed warns about the missing GPU on every rank. With a GPU, set what torch and NCCL read later.

    Raises:
        UnusableError: DS_ACCELERATOR names another one.
    """
    has_gpu = torch.cuda.is_available()
    use_accelerator("cuda" if has_gpu else "cpu")
    if has_gpu:
        set_gpu_variables()


def initialize(
    *, threads: int | None = None, timeout_seconds: float = 1800.0, binds: bool = True, tf32: bool = False
) -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs.

    Args:
        threads: CPU threads of this rank (CPU only); None: the number that OMP_NUM_THREADS or Slurm sets, else
            the node's cores divided by its ranks.
        binds: on a GPU, run only on the cores next to it.
        tf32: on a GPU, products of float32 may use TF32.
    """
    rank, size, local_rank, local_size = read_ranks()
    export_for_libraries(rank, size, local_rank, local_size)
    find_own_tools()
    if torch.cuda.is_available():
        # If the launcher shows each rank only one GPU, its index is 0 whatever the local rank.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        set_arithmetic(tf32=tf32)
        if binds:  # before NCCL starts its threads
            bind_to_gpu(device.index)
    else:
        device = torch.device("cpu")
        keep_heap()
        cores_per_rank = max(1, len(os.sched_getaffinity(0)) // local_size)
        torch.set_num_threads(threads or allotted_threads() or cores_per_rank)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if size == 1 else None  # no port to clash on
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        store=store,
        timeout=timedelta(seconds=timeout_seconds),
        # NCCL connects now, where a missing link is named, and new groups split its communicator.
        device_id=device if device.type == "cuda" else None,
    )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device)


def shut_down(*, agreed: bool) -> None:
    """Leave the process group. Without this call, warm runs abort with SIGABRT after they have succeeded.

    Args:
        agreed: whether all ranks end here, as at a normal end: wait for them. False after an error, which may be of
            this rank alone: NCCL would not let it go while others are in a collective, so only a rank without others
            leaves; the end of the process does the rest.
    """
    if not dist.is_initialized():
        return
    if agreed:
        dist.barrier()
    if agreed or dist.get_world_size() == 1:
        dist.destroy_process_group()


@contextmanager
def announce(what: str, *, after: float = _SLOW) -> Iterator[None]:
    """Print `what` on rank 0 once the block has taken `after` seconds; for the start, before a run has a tracker."""
    line = threading.Timer(after, lambda: print_on_rank0(what))
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


@contextmanager
def joining() -> Iterator[None]:
    """Announce the block, in which this rank meets the others.

    Raises:
        UnusableError: a launcher's variables are incomplete.
    """
    try:
        with announce("waiting until all ranks have started"):
            yield
    except ValueError as error:
        raise run_error(error) from error


def print_on_rank0(text: str) -> None:
    """Print a line to stderr on rank 0, where the messages of the run also appear."""
    if is_rank0():
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one piece: other threads print too


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise float64 sum over all ranks, with one all-reduce."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def from_rank0(value: Any) -> Any:
    """Return rank 0's picklable value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def decide_on_rank0(decide: Callable[[], ResultT]) -> ResultT:
    """Call `decide` on rank 0, and return its result on every rank.

    Raises:
        RunError: on every rank, if `decide` raised a RunError, ValueError or OSError; see `run_error`.
    """
    result: Any = None
    if dist.get_rank() == 0:
        try:
            result = decide()
        except REPORTED as error:
            result = run_error(error)
    result = from_rank0(result)
    if isinstance(result, RunError):
        result.is_agreed = True
        raise result
    return result


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's picklable value, in rank order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def leave_note(key: str) -> None:
    """Leave a note for all ranks on rank 0, even while collectives hang. Raises RuntimeError if rank 0 is gone."""
    _notes().set(key, "1")


def has_note(key: str) -> bool:
    """Return whether any rank has left this note. Raises RuntimeError if rank 0 is gone."""
    return bool(_notes().check([key]))


def _notes() -> Any:
    """Return the store of the rendezvous: a separate connection, which no collective uses after the rendezvous."""
    return dist.distributed_c10d._get_default_store()


class RankFailure(NamedTuple):
    """The description of an error that a rank sends to the others."""

    exit_code: int
    text: str


def describe_failure(error: BaseException | None) -> RankFailure | None:
    """Return the description of an error; None without one. Errors of the program have the exit code of a failure."""
    if error is None:
        return None
    code = run_error(error).exit_code if isinstance(error, REPORTED) else EXIT_FAILED
    return RankFailure(code, f"{type(error).__name__}: {error}")


def agree_on_error(failures: Sequence[RankFailure | None], what: str, *, own: str | None = None) -> RunError | None:
    """Return the error that all ranks raise if `what` failed on any; None if it failed on none.

    It is the user's error only if every failure is the user's: what another start may fix on one rank is the machine's.

    Args:
        failures: of every rank, in rank order.
        own: the text of the error (default: names the ranks that failed and their errors).
    """
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return None
    named = (f"rank {rank}: {failure.text}" for rank, failure in failed.items())
    lines = some(named, 3, separator="; ")  # a full disk fails on all 512 ranks alike
    is_alone = len(failures) == 1
    where = f": {failed[0].text}" if is_alone else f" on {len(failed)} of {len(failures)} ranks. {lines}"
    text = own or f"{what} failed{where}"
    codes = {failure.exit_code for failure in failed.values()}
    if EXIT_TAKEN_OVER in codes:
        return TakenOverError(text)
    if EXIT_REQUEUE in codes:
        return StoppedError(text)
    return UnusableError(text) if codes == {EXIT_USAGE} else UnfitError(text)


def agree_all_well(error: BaseException | None, what: str, *, gather: Gather = gather_objects) -> None:
    """Raise on every rank if `what` failed on any; collective.

    A rank that failed raises with its own message, unless that is the system's, which does not say what was done.

    Raises:
        UnusableError, UnfitError, TakenOverError: on every rank the same; see `agree_on_error`. A rank that is alone
            raises its own RunError.
    """
    own = str(error) if isinstance(error, (RunError, ValueError)) else None
    failures = gather(describe_failure(error))
    if len(failures) == 1 and isinstance(error, RunError):
        raise error
    agreed = agree_on_error(failures, what, own=own)
    if agreed is not None:
        agreed.is_agreed = True
        raise agreed from error


def on_all_ranks(work: Callable[[], ResultT], what: str, *, gather: Gather = gather_objects) -> ResultT:
    """Return the result of `work`, which may fail on only some ranks: it uses files of a node, or the run directory.

    Raises:
        UnusableError, UnfitError, TakenOverError: on every rank, if `work` failed on any; otherwise the other ranks
            would wait forever.
    """
    error: Exception | None = None
    result: ResultT | None = None
    try:
        result = work()
    except REPORTED as caught:
        error = caught
    agree_all_well(error, what, gather=gather)
    return cast(ResultT, result)


class PendingSum(NamedTuple):
    """A sum over all ranks that is under way."""

    values: Tensor  # (N,) float64, on the device
    work: Any  # of torch.distributed

    def wait(self) -> list[float]:
        """Return the sums; the one point at which the host waits, for all ranks and for the device."""
        self.work.wait()
        return self.values.tolist()


def begin_sum(measured: Tensor, known: Sequence[float], device: torch.device) -> PendingSum:
    """Start the element-wise float64 sum of this rank's values over all ranks; nothing waits.

    Args:
        measured: (M,) float64 on the device, perhaps not computed yet.
        known: numbers that the host has.
    """
    # From pinned memory, because a copy from other memory would wait for the device.
    own = torch.tensor(known, dtype=torch.float64, pin_memory=device.type == "cuda")
    values = torch.cat([measured, own.to(device, non_blocking=True)])
    return PendingSum(values, dist.all_reduce(values, async_op=True))

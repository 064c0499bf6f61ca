"""The ranks of a job: how they start, agree and end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dist_mem.errors import TakenOverError, UnusableError
from dist_mem.runtime.environment import (
    allotted_threads,
    export_for_libraries,
    find_own_tools,
    is_rank0,
    read_ranks,
    use_cpu_accelerator,
)

_SLOW = 2.0  # seconds after which a part of the start is announced

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class World:
    """This process among all processes of the job."""

    rank: int
    size: int
    local_rank: int  # rank on this node
    local_size: int  # ranks on this node
    device: torch.device


def choose_accelerator() -> None:
    """Select the CPU for DeepSpeed on a machine without a GPU; call this before DeepSpeed is imported.

    Otherwise DeepSpeed warns about the missing GPU on every rank.
    """
    if not torch.cuda.is_available():
        use_cpu_accelerator()


def initialize(*, threads: int | None = None, timeout_seconds: float = 1800.0) -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs.

    Args:
        threads: CPU threads of this rank (CPU only); None: the number that OMP_NUM_THREADS or Slurm sets, else
            the node's cores divided by its ranks.
    """
    rank, size, local_rank, local_size = read_ranks()
    export_for_libraries(rank, size, local_rank, local_size)
    find_own_tools()
    if torch.cuda.is_available():
        # If the launcher shows each rank only one GPU, its index is 0 whatever the local rank.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        cores_per_rank = max(1, len(os.sched_getaffinity(0)) // local_size)
        torch.set_num_threads(threads or allotted_threads() or cores_per_rank)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if size == 1 else None  # no port to clash on
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=timeout_seconds)
    )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device)


def shut_down(*, agreed: bool) -> None:
    """Leave the process group. Without this call, warm runs abort with SIGABRT after they have succeeded.

    Args:
        agreed: whether all ranks end here, as at a normal end: wait for them. False after an error on this rank alone.
    """
    if not dist.is_initialized():
        return
    if agreed:
        dist.barrier()
    dist.destroy_process_group()


@contextmanager
def announced(what: str, *, after: float = _SLOW) -> Iterator[None]:
    """Print `what` on rank 0 once the block has taken `after` seconds; for the start, before a run has a tracker."""
    line = threading.Timer(after, lambda: tell(what))
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


def tell(text: str) -> None:
    """Print a line to stderr on rank 0, where the messages of the run also appear."""
    if is_rank0():
        print(text, file=sys.stderr, flush=True)


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise float64 sum over all ranks, with one all-reduce."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def sum_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the sum of a CPU tensor over all ranks, on the CPU."""
    moved = tensor.to(device)
    dist.all_reduce(moved)
    return moved.cpu()


def from_rank0(value: Any) -> Any:
    """Return rank 0's picklable value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def decided_by_rank0(decide: Callable[[], ResultT], refusal: type[Exception] | tuple[type[Exception], ...]) -> ResultT:
    """Call `decide` on rank 0, and return its result on every rank; raise a `refusal` of it on every rank too."""
    result: Any = None
    if dist.get_rank() == 0:
        try:
            result = decide()
        except refusal as error:
            result = error
    result = from_rank0(result)
    if isinstance(result, refusal):
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


class AgreedError(RuntimeError):
    """A failure on at least one rank, raised on all ranks with the same message."""


def agree_all_well(error: BaseException | None, what: str) -> None:
    """Raise AgreedError on every rank if `what` failed on any; the message names the ranks and their errors."""
    failure = name_failures(gather_objects(describe_error(error)), what)
    if failure is not None:
        raise AgreedError(failure) from error


def describe_error(error: BaseException | None) -> str | None:
    """Return the text of an error that a rank sends to the others; None without an error."""
    return None if error is None else f"{type(error).__name__}: {error}"


def name_failures(errors: Sequence[str | None], what: str) -> str | None:
    """Return the message for the failures of `what`, given `describe_error` of every rank; None if none failed."""
    failed = {rank: message for rank, message in enumerate(errors) if message is not None}
    if not failed:
        return None
    named = [f"rank {rank}: {message}" for rank, message in failed.items()]
    lines = "; ".join(named[:3] + ["..."] * (len(named) > 3))  # a full disk fails on all 512 ranks alike
    return f"{what} failed on {len(failed)} of {len(errors)} ranks. {lines}"


class SideChannel:
    """A separate gloo group, in which a thread of every rank agrees in parallel with the training's collectives.

    All ranks open it together, in the training's thread; each rank closes it alone.

    Args:
        timeout_seconds: how long a rank waits for the slowest one.
    """

    def __init__(self, world: World, *, timeout_seconds: float = 1800.0) -> None:
        self._world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        dist.barrier(self._group)  # a rank that closes it at once would cut off others that are still connecting

    def decided_by_rank0(self, value: Any, decide: Callable[[list[Any]], ResultT]) -> ResultT:
        """Call `decide` on rank 0 with the values of all ranks, in rank order; return its result on every rank.

        Raises:
            AgreedError: on every rank, if `decide` raised; a TakenOverError stays one.
        """
        is_rank0 = self._world.rank == 0
        gathered: list[Any] | None = [None] * self._world.size if is_rank0 else None
        dist.gather_object(value, gathered, dst=0, group=self._group)
        result: Any = None
        if gathered is not None:
            try:
                result = decide(gathered)
            except Exception as error:  # of any type: the other ranks wait for rank 0, and raise it too
                is_agreed = isinstance(error, (AgreedError, TakenOverError))
                result = type(error)(str(error)) if is_agreed else AgreedError(describe_error(error))
        box = [result]
        dist.broadcast_object_list(box, src=0, group=self._group)
        if isinstance(box[0], (AgreedError, TakenOverError)):
            raise box[0]
        return cast(ResultT, box[0])

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def on_all_ranks(work: Callable[[], ResultT], what: str) -> ResultT:
    """Return the result of `work`, which may fail on only some ranks: it uses files of a node, or the run directory.

    Raises:
        UnusableError: on every rank, if `work` failed on any; otherwise the other ranks would wait forever.
    """
    error: Exception | None = None
    result: ResultT | None = None
    try:
        result = work()
    except (ValueError, OSError) as caught:
        error = caught
    try:
        agree_all_well(error, what)
    except AgreedError as agreed:
        raise UnusableError(str(error or agreed)) from error
    return cast(ResultT, result)

"""Who this process is among the others, how they start, agree and end. The only reader of environment variables.

Ranks come from RANK, LOCAL_RANK, WORLD_SIZE (torchrun, the deepspeed launcher), else from SLURM_* when this process
runs inside a job step, else this is a single process. SLURM_PROCID also stands in the batch script's environment, where
it means nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # the configuration or an argument is wrong: trying again will not help
EXIT_DIVERGED = 3  # a loss, a memory or a gradient is not finite
EXIT_REQUEUE = 85  # stopped by a signal with everything saved: start me again

ResultT = TypeVar("ResultT")

_LARGEST_STEP_ID = 4_294_967_000  # Slurm numbers the batch, extern and interactive steps from here


@dataclass(frozen=True)
class World:
    """This process among all processes of the job."""

    rank: int
    size: int
    local_rank: int  # rank on this node
    local_size: int  # ranks on this node
    device: torch.device


def in_job_step(environ: Mapping[str, str]) -> bool:
    """Whether Slurm started this very process as one task of a step (and not as the batch script)."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < _LARGEST_STEP_ID


def read_ranks(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local size) from the launcher's variables; (0, 1, 0, 1) without a launcher."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
        if missing:
            raise ValueError(f"environment: {missing[0]} is not set while its partner is; set both, or neither")
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        return rank, size, int(environ.get("LOCAL_RANK", rank)), int(environ.get("LOCAL_WORLD_SIZE", size))
    if in_job_step(environ):
        rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"])
        per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)).split("(")[0].split(",")[0]
        return rank, size, int(environ.get("SLURM_LOCALID", 0)), int(per_node)
    return 0, 1, 0, 1


def is_first_on_node() -> bool:
    """Whether this process speaks for its node, known before anything is initialized."""
    try:
        return read_ranks(os.environ)[2] == 0
    except ValueError:
        return True


def _slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost"))
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    port = 20000 + int(environ.get("SLURM_JOB_ID", 0)) % 20000
    return hosts.stdout.split()[0], str(port)


def _export_for_libraries(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Tell torch and DeepSpeed what we found, and keep libraries quiet and private."""
    if size > 1 and "MASTER_ADDR" not in os.environ:
        if not in_job_step(os.environ):
            raise ValueError(
                "environment: MASTER_ADDR and MASTER_PORT are not set; start with torchrun, deepspeed or srun"
            )
        address, port = _slurm_rendezvous(os.environ)
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", port)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(
        {name: str(value) for name, value in zip(names, (rank, size, local_rank, local_size), strict=True)}
    )


def choose_accelerator() -> None:
    """Tell DeepSpeed, before it is imported, that this machine has no GPU; else it warns about that on every rank."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _find_own_tools() -> None:
    """Put this environment's programs first on PATH: DeepSpeed compiles with `ninja`, activated environment or not."""
    own = sysconfig.get_path("scripts")
    found = os.environ.get("PATH", "").split(os.pathsep)
    if found[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, *found])


def quiet_tracking_environment() -> None:
    """MLflow sends usage figures home and asks for git unless told not to, before it is imported; and it is patient."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    # Our own thread tries again (delivery.py); MLflow would keep one call for four minutes, and log every attempt.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds; 120 by default


def tracking_uri_from_environment() -> str | None:
    """MLFLOW_TRACKING_URI, as MLflow users set it."""
    return os.environ.get("MLFLOW_TRACKING_URI")


def initialize(*, threads: int | None = None, timeout_seconds: float = 1800.0) -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs.

    Args:
        threads: CPU threads of this rank; None divides the node's cores among its ranks (CPU only).
    """
    rank, size, local_rank, local_size = read_ranks(os.environ)
    _export_for_libraries(rank, size, local_rank, local_size)
    _find_own_tools()
    if torch.cuda.is_available():
        # A launcher may show each rank one GPU only; its number is 0 then, whatever the local rank.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if size == 1 else None  # no port to clash on
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=timeout_seconds)
    )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device)


def shut_down(*, agreed: bool) -> None:
    """Leave the process group. Without it, warm runs abort with SIGABRT after they have succeeded.

    Args:
        agreed: every rank ends here (a normal end): wait for them. False after an error of this rank alone.
    """
    if not dist.is_initialized():
        return
    if agreed:
        dist.barrier()
    dist.destroy_process_group()


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise float64 sum over all ranks, one all-reduce."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def sum_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor summed over all ranks, back on the CPU."""
    moved = tensor.to(device)
    dist.all_reduce(moved)
    return moved.cpu()


def from_rank0(value: Any) -> Any:
    """Rank 0's picklable value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def decided_by_rank0(decide: Callable[[], ResultT], refusal: type[Exception]) -> ResultT:
    """What `decide` returns on rank 0, on every rank; so is the error, if it is a `refusal`."""
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
    """Every rank's picklable value, in rank order, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class AgreedError(RuntimeError):
    """Something failed on at least one rank; raised on all of them, with the same message."""


def agree_all_well(error: BaseException | None, what: str) -> None:
    """Raise AgreedError on every rank when any failed in `what`, naming the ranks and their errors."""
    told = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: message for rank, message in enumerate(told) if message is not None}
    if failed:
        lines = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
        raise AgreedError(f"{what} failed on {len(failed)} of {len(told)} ranks. {lines}") from error


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR2 set a flag; the loop acts on it at a step boundary, when all ranks know.

    USR2 and not USR1, which NCCL may catch. A second signal changes nothing, so it cannot hurt a save in progress.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous = {number: signal.signal(number, self._note) for number in self.signals}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def restore(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            with suppress(TypeError):  # a handler installed from C reads as None and cannot be put back
                signal.signal(number, handler)

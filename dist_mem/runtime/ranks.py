"""The ranks of a job in environment variables: read from the launcher, exported for torch and DeepSpeed. No torch here.

Ranks come from RANK, LOCAL_RANK, WORLD_SIZE (torchrun, the deepspeed launcher), else from SLURM_* when this process
runs inside a job step, else this is a single process. SLURM_PROCID is also set in the batch script's environment, where
it means nothing.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.environment import extension_cache, set_default, variable, whole_number
from dist_mem.runtime.network_interface import interface_towards, own_name_is_loopback, without_brackets
from dist_mem.runtime.slurm_variables import environment_of_slurm

_FIX = "unset RANK and WORLD_SIZE for one process, or start with torchrun, deepspeed or srun"
_SCONTROL_SECONDS = 10.0  # for an answer
_LARGEST_STEP_ID = 4_294_967_000  # Slurm numbers the batch, extern and interactive steps from here


def in_job_step(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm started this process as a task of a job step: not as the batch script, nor in a shell."""
    step = variable("SLURM_STEP_ID", environ) or ""
    is_step = variable("SLURM_PROCID", environ) is not None and step.isdecimal() and int(step) < _LARGEST_STEP_ID
    return is_step and not _in_interactive_shell(environ)


def _in_interactive_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started from a shell of `srun --pty`, which is task 0 of a step of its own.

    The variables of that step are also in those that srun starts from the shell; their tasks have no terminal.
    """
    if variable("SLURM_PTY_PORT", environ) is None or variable("SLURM_TASK_PID", environ) == str(os.getpid()):
        return False
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


def read_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local size), as the launcher sets them; (0, 1, 0, 1) without a launcher."""
    given = {name: text for name in ("RANK", "WORLD_SIZE") if (text := variable(name, environ))}
    if given:
        for missing, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if missing not in given:
                raise ValueError(
                    f"environment: {missing} is not set, but {other} is {given[other]!r}; set both, or neither"
                )
        rank, size = _read_rank(environ, "RANK", "WORLD_SIZE")
        has_torchruns_name = variable("LOCAL_WORLD_SIZE", environ) is not None
        of_node = "LOCAL_WORLD_SIZE" if has_torchruns_name else "LOCAL_SIZE"  # the second is DeepSpeed's
        return rank, size, *_read_rank(environ, "LOCAL_RANK", of_node, (rank, size))
    if in_job_step(environ):
        rank, size = _read_rank(environ, "SLURM_PROCID", "SLURM_NTASKS")
        name = "SLURM_STEP_TASKS_PER_NODE"
        per_node = (variable(name, environ) or str(size)).split("(")[0].split(",")[0]  # of the first node: 2(x3),1
        local_size = whole_number({name: per_node}, name, size, _FIX)
        return rank, size, whole_number(environ, "SLURM_LOCALID", 0, _FIX), local_size
    return 0, 1, 0, 1


def _read_rank(
    environ: Mapping[str, str], number: str, count: str, default: tuple[int, int] = (0, 1)
) -> tuple[int, int]:
    """Return the values of the variable `number`, a rank, and of `count`, how many ranks there are."""
    rank = whole_number(environ, number, default[0], _FIX)
    size = whole_number(environ, count, default[1], _FIX)
    if rank >= size:
        between = f"the ranks are 0 to {size - 1}" if size else "it must be at least 1"
        raise ValueError(f"environment: {number} is {rank}, but {count} is {size}: {between}; {_FIX}")
    return rank, size


def is_rank0() -> bool:
    """Return whether this is rank 0, which prints for the job; works before anything is initialized."""
    return _is_first(0)


def is_first_on_node() -> bool:
    """Return whether this is the first rank of its node, which prints for the node; works as early as `is_rank0`."""
    return _is_first(2)


def _is_first(index: int) -> bool:
    try:
        return read_ranks()[index] == 0
    except ValueError:  # only half of a launcher's variables: reported later
        return True


def export_for_libraries(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Export the ranks, the rendezvous address, gloo's interface and the extension cache for torch and DeepSpeed."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if variable(name) is None]
    if size > 1 and missing:
        if not in_job_step(os.environ):
            which = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}"
            raise ValueError(f"environment: {which} not set; start with torchrun, deepspeed or srun")
        if "MASTER_ADDR" in missing:
            os.environ["MASTER_ADDR"] = _first_node()
        if "MASTER_PORT" in missing:
            os.environ["MASTER_PORT"] = str(port_of_step(os.environ))
    host, port = without_brackets(variable("MASTER_ADDR") or "127.0.0.1"), variable("MASTER_PORT") or "0"
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    if size == 1 and not port.isdecimal():  # Kubernetes sets tcp://10.0.0.7:29500
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # one process meets nobody
    whole_number(os.environ, "MASTER_PORT", 0, "give a free port, as 29500", most=65_535)
    if size > local_size and variable("GLOO_SOCKET_IFNAME") is None and own_name_is_loopback():
        interface = interface_towards(host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    set_default("TORCH_EXTENSIONS_DIR", str(extension_cache()))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(
        {name: str(value) for name, value in zip(names, (rank, size, local_rank, local_size), strict=True)}
    )


def port_of_step(environ: Mapping[str, str]) -> int:
    """Return a port for a Slurm step, below those that the kernel gives out.

    Steps of one job, and jobs with near numbers, have different ones: they may run on one node.
    """
    job, step = (int(variable(name, environ) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 10_000 + (job + 7919 * step) % 20_000


def job_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Return what the ranks of this job share, and other jobs do not, as far as the launcher says; "" if it does not.

    Two jobs may have one port: then the ranks of one must not join the other.
    """
    ranks = [("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")]  # the same after `export_for_libraries`
    of_slurm = all(variable(name, environ) in (None, variable(own, environ)) for name, own in ranks)
    if not of_slurm or not in_job_step(environ):
        return variable("TORCHELASTIC_RUN_ID", environ) or ""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(variable(name, environ) or "" for name in names)


def _first_node() -> str:
    """Return the first node of the step: its name or, if that does not resolve, its address."""
    nodes = variable("SLURM_STEP_NODELIST") or variable("SLURM_JOB_NODELIST") or "localhost"
    host = _scontrol("hostnames", nodes).split()[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", host, "--oneliner"))
        host = found[1] if found else host
    return host


def slurm_nodes() -> list[str]:
    """Return the nodes of this Slurm job step; none outside of one, or if scontrol does not answer."""
    nodes = variable("SLURM_STEP_NODELIST") or variable("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    try:
        return _scontrol("hostnames", nodes).split()
    except UnfitError:
        return []


def _scontrol(*words: str) -> str:
    """Return what scontrol shows. Raises UnfitError if it does not answer."""
    try:
        command = ["scontrol", "show", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SCONTROL_SECONDS, env=environment_of_slurm()
        )
        return done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnfitError(f"scontrol does not name the first node of this step ({error}); set MASTER_ADDR") from error


def rendezvous_address() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT; call `export_for_libraries` first."""
    return variable("MASTER_ADDR") or "", whole_number(os.environ, "MASTER_PORT", 0, "give a free port")


def agent_keeps_store() -> bool:
    """Return whether the launcher hosts the store of the rendezvous, as torchrun does; else rank 0 does."""
    return variable("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_restarts() -> int:
    """Return how often torchrun has restarted all ranks."""
    return whole_number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0, "unset it")


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None if it is not set, so that all GPUs are visible; empty: none is."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def gpus_are_hidden() -> bool:
    """Return whether the user has chosen CPUs: CUDA_VISIBLE_DEVICES begins with no GPU, as if empty or -1."""
    devices = visible_devices()
    return devices is not None and re.match(r"\s*(\d|GPU-|MIG-)", devices) is None


def names_of_gpus(number: int) -> list[str]:
    """Return the names of the first GPUs that this process sees, for the CUDA_VISIBLE_DEVICES of others."""
    devices = visible_devices()
    return [str(index) for index in range(number)] if devices is None else devices.split(",")[:number]


def slurm_gave_gpus() -> bool:
    """Return whether Slurm has allocated GPUs on this node to this job."""
    names = ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
    return any(variable(name) not in (None, "0") for name in names)


def allotted_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the CPU threads of a rank: OMP_NUM_THREADS, else SLURM_CPUS_PER_TASK; None if neither is set."""
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        # OpenMP accepts one number per nesting level.
        number = (variable(name, environ) or "").partition(",")[0].strip()
        if name == "OMP_NUM_THREADS" and number == "1" and variable("TORCHELASTIC_RUN_ID", environ):
            continue  # torchrun sets it if the user has not
        if number.isdecimal() and int(number) > 0:
            return int(number)
    return None


def use_accelerator(name: str) -> None:
    """Let DeepSpeed take this accelerator; call this before DeepSpeed is imported.

    Args:
        name: cpu, or cuda.

    Raises:
        UnusableError: DS_ACCELERATOR names one that dist_mem cannot use here.
    """
    given = variable("DS_ACCELERATOR")
    if given not in (None, "cpu", name):
        raise UnusableError(f"environment: DS_ACCELERATOR is {given!r}, but dist_mem takes {name!r} here; unset it")
    if given is None:
        os.environ.pop("DS_ACCELERATOR", None)  # DeepSpeed refuses an empty one
    if name == "cpu":
        os.environ["DS_ACCELERATOR"] = name


def note_exit_code(code: int) -> None:
    """Write the exit code of the job to the file that DIST_MEM_EXIT_CODE names, if it is set and this is rank 0.

    The batch script reads it. srun reports the highest code of all ranks, which may be that of a rank that srun
    terminated because another one had ended.
    """
    path = variable("DIST_MEM_EXIT_CODE")
    with suppress(ValueError, OSError):  # wrong variables: reported before; a full disk: srun's code is left
        if path and read_ranks()[0] == 0:
            Path(path).write_text(f"{code}\n", encoding="ascii")

"""The only reader and writer of environment variables: ranks, caches, MLflow, Slurm, git. Imports no torch.

Ranks come from RANK, LOCAL_RANK, WORLD_SIZE (torchrun, the deepspeed launcher), else from SLURM_* when this process
runs inside a job step, else this is a single process. SLURM_PROCID is also set in the batch script's environment, where
it means nothing.
"""

from __future__ import annotations

import getpass
import hashlib
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dist_mem.runtime.files import NotOwnError, is_file, make_own
from dist_mem.runtime.network_interface import interface_towards, own_name_is_loopback

_LARGEST_STEP_ID = 4_294_967_000  # Slurm numbers the batch, extern and interactive steps from here


def is_set(name: str) -> bool:
    """Return whether a variable of this name is set."""
    return name in os.environ


def in_job_step(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm started this process as a task of a job step, not as the batch script."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < _LARGEST_STEP_ID


def read_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local size), as the launcher sets them; (0, 1, 0, 1) without a launcher."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
        if missing:
            raise ValueError(f"environment: {missing[0]} is not set while its partner is; set both, or neither")
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_size = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", size))  # torchrun's name, deepspeed's
        return rank, size, int(environ.get("LOCAL_RANK", rank)), int(local_size)
    if in_job_step(environ):
        rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"])
        per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)).split("(")[0].split(",")[0]
        return rank, size, int(environ.get("SLURM_LOCALID", 0)), int(per_node)
    return 0, 1, 0, 1


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


def _first_node(environ: Mapping[str, str]) -> str:
    """Return the first node of the step: its name or, if that does not resolve, its address."""
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost"))
    host = _scontrol("hostnames", nodes).split()[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("node", host, "--oneliner"))
        host = found[1] if found else host
    return host


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", "show", *words], capture_output=True, text=True, check=True).stdout


def export_for_libraries(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Export the ranks, the rendezvous address, gloo's interface and the extension cache for torch and DeepSpeed."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        if not in_job_step(os.environ):
            which = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}"
            raise ValueError(f"environment: {which} not set; start with torchrun, deepspeed or srun")
        if "MASTER_ADDR" in missing:
            os.environ["MASTER_ADDR"] = _first_node(os.environ)
        if "MASTER_PORT" in missing:
            os.environ["MASTER_PORT"] = str(10000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if size > local_size and "GLOO_SOCKET_IFNAME" not in os.environ and own_name_is_loopback():
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extension_cache()))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(
        {name: str(value) for name, value in zip(names, (rank, size, local_rank, local_size), strict=True)}
    )


def use_cpu_accelerator() -> None:
    """Set DS_ACCELERATOR=cpu, unless the user has set it; call this before DeepSpeed is imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def note_exit_code(code: int) -> None:
    """Write the exit code of the job to the file that DIST_MEM_EXIT_CODE names, if it is set and this is rank 0.

    The batch script reads it. srun reports the highest code of all ranks, which may be that of a rank that srun
    terminated because another one had ended.
    """
    path = os.environ.get("DIST_MEM_EXIT_CODE")
    with suppress(ValueError, OSError):  # wrong variables: reported before; a full disk: srun's code is left
        if path and read_ranks()[0] == 0:
            Path(path).write_text(f"{code}\n", encoding="ascii")


def find_own_tools() -> None:
    """Put this environment's programs first on PATH: DeepSpeed needs `ninja` even if no environment is activated."""
    own = sysconfig.get_path("scripts")
    found = os.environ.get("PATH", "").split(os.pathsep)
    if found[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, *found])


def quiet_tracking_environment() -> None:
    """Configure MLflow before its import: no telemetry, no need for git, no retries, no prints of its own."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    # The delivery thread retries (delivery.py); MLflow would spend four minutes on one call, and log every attempt.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; 120 by default
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our own message contains it


def user_cache_dir() -> Path:
    """Return the folder of this user's caches: XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def temporary_dir() -> Path:
    """Return this node's folder for temporary files: TMPDIR, which a cluster may set for each job, else /tmp."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


class MlflowEnvironment(NamedTuple):
    """MLflow's variables: the store, the run to log to, the experiment."""

    uri: str | None
    run_id: str | None
    experiment_name: str | None
    experiment_id: str | None


def mlflow_environment() -> MlflowEnvironment:
    """Read MLFLOW_TRACKING_URI, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID; None if unset or empty."""
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
    return MlflowEnvironment(*(os.environ.get(name) or None for name in names))


def mlflow_credentials_set() -> list[str]:
    """Return the names, but not the values, of the variables with MLflow credentials that are set."""
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    return [name for name in names if os.environ.get(name)]


def slurm_job() -> dict[str, str]:
    """Return SLURM_JOB_ID, _JOB_NODELIST, _RESTART_COUNT, _ARRAY_JOB_ID, _ARRAY_TASK_ID; an empty dict outside Slurm.

    Slurm sets the restart count only after the first restart, and the last two only in an array.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    known = {name: os.environ[name] for name in names if name in os.environ}
    return {**known, "SLURM_RESTART_COUNT": os.environ.get("SLURM_RESTART_COUNT", "0")}


def user_name() -> str | None:
    """Return the user of this process; None if unknown, as in a container without a list of users."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


SNAPSHOT_FILES = "files"  # in the folder that DIST_MEM_SNAPSHOT names


def as_submitted(path: Path) -> Path:
    """Return the path of a file's copy in the job's snapshot, DIST_MEM_SNAPSHOT; the path itself if there is none."""
    folder = os.environ.get("DIST_MEM_SNAPSHOT")
    if not folder:
        return path
    copy = Path(folder) / SNAPSHOT_FILES / Path(os.path.normpath(path.absolute())).relative_to("/")
    return copy if is_file(copy) else path


def node_name() -> str:
    """Return the name of this node: Slurm's, which may run several nodes on one host, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_end() -> float | None:
    """Return DIST_MEM_JOB_END, the end of this job's time in seconds since 1970; None if it is not set.

    Raises:
        ValueError: it is not a finite number.
    """
    text = os.environ.get("DIST_MEM_JOB_END")
    if not text:
        return None
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise ValueError(
            f"environment: DIST_MEM_JOB_END is {text!r}, but must be seconds since 1970, as `date +%s` prints; unset "
            "it where the time of the job has no end"
        )
    return end


def system_metrics_interval() -> float:
    """Return MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL in seconds; 10 if it is not set, as in MLflow."""
    name = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
    text = os.environ.get(name) or "10"
    try:
        interval = float(text)
    except ValueError:
        interval = math.nan
    if not 0 < interval <= threading.TIMEOUT_MAX:
        raise ValueError(f"environment: {name} is {text!r}, but must be a number of seconds; unset it for 10")
    return interval


def environment_of_git() -> dict[str, str]:
    """Return the environment without the variables by which a git hook directs all git commands to its repository."""
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
    return {**{name: value for name, value in os.environ.items() if name not in named}, "LC_ALL": "C"}


def environment_of_slurm() -> dict[str, str]:
    """Return the environment for Slurm's commands, without SQUEUE_* and SCANCEL_*, which change output and prompts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    return {**kept, "SLURM_TIME_FORMAT": "standard"}


def with_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with `added`, for a child process."""
    return {**os.environ, **added}


def meeting_point() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT; call `export_for_libraries` first."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def agent_keeps_store() -> bool:
    """Return whether the launcher hosts the store of the rendezvous, as torchrun does; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_restarts() -> int:
    """Return how often torchrun has restarted all ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def gpus_are_hidden() -> bool:
    """Return whether the user has chosen CPUs: CUDA_VISIBLE_DEVICES is set and empty."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def slurm_gave_gpus() -> bool:
    """Return whether Slurm has allocated GPUs on this node to this job."""
    return any(os.environ.get(name, "0") != "0" for name in ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"))


def slurm_nodes() -> list[str]:
    """Return the nodes of this Slurm job step; none outside of one, or if scontrol does not answer."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split()


def extension_cache() -> Path:
    """Return the folder in which this environment's ops are compiled, unless TORCH_EXTENSIONS_DIR is set.

    torch's own folder depends on the versions of Python and CUDA only. Two environments would share it, and each would
    recompile after the other: the command that ninja compares contains the paths of torch, of DeepSpeed's sources and
    of Python's headers.
    """
    packages = [find_spec(name) for name in ("torch", "deepspeed")]
    places = [sysconfig.get_path("include"), *(str(spec.origin) for spec in packages if spec is not None)]
    identity = hashlib.sha256("\n".join(places).encode()).hexdigest()[:12]
    return user_cache_dir() / "torch_extensions" / f"py{sysconfig.get_python_version()}-{identity}"


def compiler_caches() -> dict[str, tuple[Path, str]]:
    """Return the cache of each compiler: name -> its directory, and the variable that moves it."""
    temporary = Path(tempfile.gettempdir())
    triton_home = Path(os.environ.get("TRITON_HOME") or "~").expanduser()
    inductor = temporary / f"torchinductor_{os.environ.get('USER', '')}"
    usual = {
        "TORCH_EXTENSIONS_DIR": ("DeepSpeed's ops", extension_cache()),
        "TRITON_CACHE_DIR": ("Triton", triton_home / ".triton" / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": ("torch.compile", inductor),
        "TMPDIR": ("temporary files", temporary),
    }
    return {name: (Path(os.environ.get(key) or path), key) for key, (name, path) in usual.items()}


_NODE_CACHES = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}


def use_node_caches() -> None:
    """Move the compilers' caches to DIST_MEM_CACHES, a disk of this node; do nothing if it is not set.

    Compiled code is loaded from there, and everybody may write to such a disk, so only this user may be able to write
    to the folder in it. Otherwise the caches go to a folder for this node in the user's cache directory.
    """
    place = os.environ.get("DIST_MEM_CACHES")
    if not place:
        return
    folder = Path(place) / f"dist_mem-{os.getuid()}"
    try:
        make_own(folder)
    except (NotOwnError, OSError) as error:
        folder = user_cache_dir() / "dist_mem" / node_name()
        if is_first_on_node():
            print(f"warning: {error}; compiled code is kept in {folder}", file=sys.stderr)
    for variable, name in _NODE_CACHES.items():
        os.environ.setdefault(variable, str(folder / name))


def allotted_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the CPU threads of a rank: OMP_NUM_THREADS, else SLURM_CPUS_PER_TASK; None if neither is set."""
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        number = environ.get(name, "").partition(",")[0].strip()  # OpenMP accepts one number per nesting level
        if name == "OMP_NUM_THREADS" and number == "1" and "TORCHELASTIC_RUN_ID" in environ:
            continue  # torchrun sets it if the user has not
        if number.isdecimal() and int(number) > 0:
            return int(number)
    return None


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch's extension builder uses: CXX, else c++ or g++; None if there is none."""
    requested = os.environ.get("CXX")
    return shutil.which(requested) if requested else shutil.which("c++") or shutil.which("g++")


def environment_of_rank(rank: int, size: int, port: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank on this node, as torchrun sets it, without the scheduler's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    kept.pop("DIST_MEM_JOB_END", None)
    return {**kept, **{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "127.0.0.1", **more}

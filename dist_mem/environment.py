"""The only reader and writer of environment variables: ranks, caches, MLflow, Slurm, git. Imports no torch.

Ranks come from RANK, LOCAL_RANK, WORLD_SIZE (torchrun, the deepspeed launcher), else from SLURM_* when this process
runs inside a job step, else this is a single process. SLURM_PROCID also stands in the batch script's environment, where
it means nothing.
"""

from __future__ import annotations

import math
import os
import subprocess
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LARGEST_STEP_ID = 4_294_967_000  # Slurm numbers the batch, extern and interactive steps from here


def in_job_step(environ: Mapping[str, str]) -> bool:
    """Whether Slurm started this very process as one task of a step (and not as the batch script)."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < _LARGEST_STEP_ID


def read_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int, int, int]:
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
        return read_ranks()[2] == 0
    except ValueError:
        return True


def _slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost"))
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    port = 20000 + int(environ.get("SLURM_JOB_ID", 0)) % 20000
    return hosts.stdout.split()[0], str(port)


def export_for_libraries(rank: int, size: int, local_rank: int, local_size: int) -> None:
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


def use_cpu_accelerator() -> None:
    """Tell DeepSpeed, before it is imported, that there is no GPU, unless the user has told it something."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def find_own_tools() -> None:
    """Put this environment's programs first on PATH: DeepSpeed compiles with `ninja`, activated environment or not."""
    own = sysconfig.get_path("scripts")
    found = os.environ.get("PATH", "").split(os.pathsep)
    if found[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, *found])


def quiet_tracking_environment() -> None:
    """Before mlflow is imported: no usage figures home, no demand for git, no patience, no prints between ours."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    # Our own thread tries again (delivery.py); MLflow would keep one call for four minutes, and log every attempt.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; 120 by default
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our own message has it


def user_cache_dir() -> Path:
    """Where this user's caches lie: XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


class MlflowEnvironment(NamedTuple):
    """What MLflow users set: the store, the run to log to, the experiment."""

    uri: str | None
    run_id: str | None
    experiment_name: str | None
    experiment_id: str | None


def mlflow_environment() -> MlflowEnvironment:
    """MLFLOW_TRACKING_URI, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID; None where unset or empty."""
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
    return MlflowEnvironment(*(os.environ.get(name) or None for name in names))


def slurm_job() -> dict[str, str]:
    """Which Slurm job this is: SLURM_JOB_ID, SLURM_JOB_NODELIST, SLURM_RESTART_COUNT, those that are set."""
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
    return {name: os.environ[name] for name in names if name in os.environ}


def system_metrics_interval() -> float:
    """MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, seconds; 10 without it, as in MLflow."""
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
    """The environment without what a git hook sets to make every git command speak of its repository."""
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
    return {**{name: value for name, value in os.environ.items() if name not in named}, "LC_ALL": "C"}

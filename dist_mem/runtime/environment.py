"""Environment variables of users, MLflow, Slurm and git; ranks.py has those of ranks. Imports no torch.

No module outside of runtime/ reads os.environ, and in runtime/ `variable` reads it: a variable that is set to empty is
one that is not set. Libraries read others after us, each in its own way, so `drop_empty` removes empty ones when the
program starts.
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import math
import os
import pwd
import re
import shutil
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TextIO

from dist_mem.runtime.files import is_file

# Of Python, torch, its compilers and launchers, DeepSpeed, NCCL, gloo, OpenMP, Hugging Face and the tracking.
_OF_LIBRARIES = re.compile(
    "(DIST_MEM|DS|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|TRITON|NCCL|GLOO|OMP|MKL|MASTER|HF|HUGGINGFACE|XDG|MLFLOW"
    "|WANDB|TRANSFORMERS)_.*|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|LOCAL_SIZE"
    "|HOME|TMPDIR|TEMP|TMP|MPLCONFIGDIR|CXX|CC|MAX_JOBS|CUDA_HOME"
)


def variable(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of a variable; None if it is not set, or empty."""
    return environ.get(name) or None


def set_default(name: str, value: str) -> None:
    """Set a variable, unless it has a value."""
    os.environ[name] = variable(name) or value


def drop_empty() -> None:
    """Remove the empty variables that libraries read; CUDA_VISIBLE_DEVICES stays, where empty means no GPU."""
    for name in [name for name, value in os.environ.items() if not value and _OF_LIBRARIES.fullmatch(name)]:
        del os.environ[name]


def is_set(name: str) -> bool:
    """Return whether a variable of this name is set, if only to empty: `${oc.env:NAME}` reads it then."""
    return name in os.environ


def wants_colour(choice: str, stream: TextIO | None = None) -> bool:
    """Return whether to print colours into a stream (default: stdout).

    Args:
        choice: `always`, `never`, or `auto`: on a terminal, or with FORCE_COLOR or CLICOLOR_FORCE; never with NO_COLOR,
            which precedes them. An empty variable counts as not set, and so does 0 for the first two.
    """
    if choice != "auto":
        return choice == "always"
    if variable("NO_COLOR"):
        return False
    is_terminal = (stream or sys.stdout).isatty() and variable("TERM") != "dumb"
    return _is_on("FORCE_COLOR") or _is_on("CLICOLOR_FORCE") or is_terminal


def _is_on(name: str) -> bool:
    return variable(name) not in (None, "0")


def wandb_environment(*, project: str) -> str:
    """Configure W&B before its import, without reports of errors to its makers; return its mode (default: offline).

    Args:
        project: used unless WANDB_PROJECT is set.
    """
    set_default("WANDB_ERROR_REPORTING", "false")
    set_default("WANDB_PROJECT", project)
    return variable("WANDB_MODE") or "offline"


def quiet_tracking_environment() -> None:
    """Configure MLflow before its import: no telemetry, no need for git, no retries, no prints of its own.

    A variable of MLflow that is set to empty is unset: MLflow reads most of them as numbers or booleans, and fails.
    """
    drop_empty()
    set_default("MLFLOW_DISABLE_TELEMETRY", "true")
    set_default("GIT_PYTHON_REFRESH", "quiet")
    # The delivery thread retries (sender.py); MLflow would spend four minutes on one call, and log every attempt.
    set_default("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    set_default("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; 120 by default
    set_default("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our own message contains it


@contextmanager
def settings_of(logger: str) -> Iterator[None]:
    """Let a library be set up for one call: its logger's level, environment variables, filters of warnings."""
    environment, log = dict(os.environ), logging.getLogger(logger)
    level = log.level
    try:
        with warnings.catch_warnings():
            yield
    finally:
        log.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def home_dir() -> Path | None:
    """Return the home directory of this user; None if there is none.

    A folder that is there is one even if it is read-only: it may hold credentials. The root directory is what
    containers give to a user whom they do not know.
    """
    home = _named_home()
    if home is None:
        return None
    there = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    is_home = there == home and home.is_dir() and home != Path("/")
    return home if is_home or os.access(there, os.W_OK | os.X_OK) else None


def _named_home() -> Path | None:
    """Return what HOME names, else the list of users; None if neither does."""
    if home := variable("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def home_of_libraries() -> Path:
    """Return the folder in which libraries keep the files of this user: the home, else one in TMPDIR."""
    return _named_home() or temporary_dir() / f"dist_mem-{os.getuid()}" / "home"


def user_cache_dir() -> Path:
    """Return the folder of this user's caches: XDG_CACHE_HOME, else .cache in the home."""
    given = variable("XDG_CACHE_HOME")
    return Path(given).expanduser() if given else home_of_libraries() / ".cache"


def expand_variables(text: str) -> str:
    """Return a text in which $NAME and ${NAME} are the values of variables; of those that are not set, unchanged."""
    return os.path.expandvars(text)


def temporary_dir() -> Path:
    """Return this node's folder for temporary files: TMPDIR, which a cluster may set for each job, else /tmp."""
    return Path(variable("TMPDIR") or "/tmp")


class MlflowEnvironment(NamedTuple):
    """MLflow's variables: the store, the run to log to, the experiment."""

    uri: str | None
    run_id: str | None
    experiment_name: str | None
    experiment_id: str | None


def mlflow_environment() -> MlflowEnvironment:
    """Read MLFLOW_TRACKING_URI, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID; None if unset or empty."""
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
    return MlflowEnvironment(*map(variable, names))


def mlflow_credentials_set() -> list[str]:
    """Return the names, but not the values, of the variables with MLflow credentials that are set."""
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    return [name for name in names if variable(name)]


def slurm_job() -> dict[str, str]:
    """Return SLURM_JOB_ID, _JOB_NODELIST, _RESTART_COUNT, _ARRAY_JOB_ID, _ARRAY_TASK_ID; an empty dict outside Slurm.

    Slurm sets the restart count only after the first restart, and the last two only in an array.
    """
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    known = {name: value for name in names if (value := variable(name))}
    if "SLURM_JOB_ID" not in known:
        return {}
    return {**known, "SLURM_RESTART_COUNT": variable("SLURM_RESTART_COUNT") or "0"}


def user_name() -> str | None:
    """Return the user of this process; None if unknown, as in a container without a list of users."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


SNAPSHOT_FILES = "files"  # in the folder that DIST_MEM_SNAPSHOT names


def as_submitted(path: Path) -> Path:
    """Return the path of a file's copy in the job's snapshot, DIST_MEM_SNAPSHOT; the path itself if there is none."""
    folder = variable("DIST_MEM_SNAPSHOT")
    if folder is None:
        return path
    copy = Path(folder) / SNAPSHOT_FILES / Path(os.path.normpath(path.absolute())).relative_to("/")
    return copy if is_file(copy) else path


def node_name() -> str:
    """Return the name of this node: Slurm's, which may run several nodes on one host, else the host name."""
    return variable("SLURMD_NODENAME") or socket.gethostname()


def _number(name: str) -> float | None:
    """Return the value of a variable as a number, nan if it is none; None if it is not set."""
    text = variable(name)
    try:
        return float(text) if text else None
    except ValueError:
        return math.nan


def whole_number(environ: Mapping[str, str], name: str, default: int, fix: str, most: int = 2**31 - 1) -> int:
    """Return the value of a variable that counts, or the default if it is not set.

    Raises:
        ValueError: it is no whole number from 0 to `most`; the message ends with `fix`.
    """
    text = variable(name, environ)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > most:
        raise ValueError(f"environment: {name} is {text!r}, but must be a whole number from 0 to {most:,}; {fix}")
    return int(text)


def job_end() -> float | None:
    """Return DIST_MEM_JOB_END, the end of this job's time in seconds since 1970; None if it is not set.

    Raises:
        ValueError: it is not a finite number.
    """
    end = _number("DIST_MEM_JOB_END")
    if end is not None and not math.isfinite(end):
        raise ValueError(
            f"environment: DIST_MEM_JOB_END is {variable('DIST_MEM_JOB_END')!r}, but must be seconds since 1970, as "
            "`date +%s` prints; unset it where the time of the job has no end"
        )
    return end


def system_metrics_interval() -> float:
    """Return MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL in seconds; 10 if it is not set, as in MLflow."""
    name = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
    interval = _number(name)
    if interval is not None and not 0 < interval <= threading.TIMEOUT_MAX:
        raise ValueError(f"environment: {name} is {variable(name)!r}, but must be a number of seconds; unset it for 10")
    return interval or 10.0


def environment_of_git() -> dict[str, str]:
    """Return the environment without the variables by which a git hook directs all git commands to its repository."""
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
    return {**{name: value for name, value in os.environ.items() if name not in named}, "LC_ALL": "C"}


def keep_working_directory_out() -> None:
    """Let no Python that this process starts import from the working directory; call this when the program starts.

    A tree of the sources that is not installed stays importable if this process has found it in the working directory.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    own = Path(__file__).parents[2]
    if not sys.flags.safe_path and Path(sys.path[0] or ".").resolve() == own:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(own), variable("PYTHONPATH")]))


def with_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with `added`, for a child process."""
    return {**os.environ, **added}


def extension_cache() -> Path:
    """Return the folder in which this environment's ops are compiled, unless TORCH_EXTENSIONS_DIR is set.

    torch's own folder depends on the versions of Python and CUDA only. Two environments would share it, and each would
    recompile after the other: the command that ninja compares contains the paths of torch, of DeepSpeed's sources and
    of Python's headers, and the compiler: CXX, after ccache or sccache where one is on PATH.
    """
    packages = [find_spec(name) for name in ("torch", "deepspeed")]
    places = [sysconfig.get_path("include"), *(str(spec.origin) for spec in packages if spec is not None)]
    wrapper = None if variable("TORCH_NO_COMPILER_WRAPPER") else shutil.which("ccache") or shutil.which("sccache")
    places += [part for part in (wrapper, variable("CXX")) if part]
    identity = hashlib.sha256("\n".join(places).encode()).hexdigest()[:12]
    return user_cache_dir() / "torch_extensions" / f"py{sysconfig.get_python_version()}-{identity}"

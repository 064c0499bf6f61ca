"""Choose the MLflow store, experiment and run of a run directory, and whether a job sends to the store while it runs.

A server accepts data from many jobs at the same time. An SQLite file does not: on a network file system its locks do
not work, and the tasks of an array lock each other out. There a job only writes its log, and `dist-mem track sync`
sends it. The run is that of RUN/mlflow_run_id, of the checkpoint, or of MLFLOW_RUN_ID, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from dist_mem.config import Config
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment, slurm_job
from dist_mem.runtime.files import file_system_of, is_network_file_system, write_text
from dist_mem.tracking.provenance import without_credentials

RUN_ID_FILE = "mlflow_run_id"  # in the run directory
DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "dist_mem"
_SCHEMES = ("http", "https", "sqlite", "mysql", "postgresql", "mssql", "file", "databricks")
_RUN_ID = re.compile(r"[a-zA-Z0-9][\w-]{0,255}", re.ASCII)


class Sending(NamedTuple):
    """Whether a job sends to MLflow, and why."""

    is_on: bool
    message: str  # one line for the user


def store_uri(config: Config) -> str:
    """Return `tracking.uri`, else MLFLOW_TRACKING_URI, else a file in the current directory."""
    return config.tracking.uri or mlflow_environment().uri or DEFAULT_URI


def is_named_by_user(config: Config, overrides: Sequence[str] = ()) -> bool:
    """Whether the store in a run's configuration is also named by the user, or is the default.

    Args:
        overrides: of the command line, already in `config`; a user's configuration file counts as `tracking.uri=...`.
    """
    is_given = any(override.startswith("tracking.uri=") for override in overrides)
    return is_given or store_uri(config) in (mlflow_environment().uri, DEFAULT_URI)


def is_local(uri: str) -> bool:
    """Whether a store is a local file or folder, not a server or database that a client logs in to."""
    scheme = urlsplit(uri).scheme
    return (scheme in ("", "file") and uri != "databricks") or scheme == "sqlite"


def check_store(uri: str) -> None:
    """Check the address of a store, without connecting to it.

    Raises:
        UnusableError: it is malformed, or neither MLflow nor one of its plugins has stores of its kind; or the folder
            of an SQLite file does not exist.
    """
    try:
        shown = f"tracking.uri is {without_credentials(uri)!r}"
    except ValueError as error:  # as for an unmatched bracket
        raise UnusableError(f"tracking.uri is no address: {error}; correct it, or MLFLOW_TRACKING_URI") from None
    scheme, found, _ = uri.partition("://")
    offered = entry_points(group="mlflow.tracking_store").names
    if found and scheme.partition("+")[0] not in (*_SCHEMES, *offered):
        raise UnusableError(
            f"{shown}, but MLflow has no stores of the kind {scheme!r}; give one of {', '.join(_SCHEMES)}, or a folder"
        )
    file = file_of(uri)
    if scheme.startswith("sqlite") and file and ":" not in str(file) and not file.parent.exists():
        percent = " (a % in its name is written %25)" if "%" in uri else ""
        raise UnusableError(f"{shown}, but there is no folder {file.parent}; create it, or set tracking.uri{percent}")


def is_missing_file(uri: str) -> bool:
    """Whether a store is an SQLite file that does not exist; MLflow would create it."""
    file = file_of(uri)
    return uri.startswith("sqlite") and file is not None and not file.exists()


def is_server(uri: str) -> bool:
    """Whether the store is reached through an HTTP server."""
    return urlsplit(uri).scheme in ("http", "https")


def experiment_of(config: Config) -> dict[str, str]:
    """Return {"name": ...} or {"id": ...}: from the configuration, else the environment, else the default."""
    environment = mlflow_environment()
    name = config.tracking.experiment or environment.experiment_name
    if environment.experiment_id and not name:
        return {"id": environment.experiment_id}
    return {"name": name or DEFAULT_EXPERIMENT}


def choose_sending(config: Config) -> Sending:
    """Resolve `tracking.send` for this store, file system and kind of job."""
    uri = store_uri(config)
    shown = without_credentials(uri)
    obstacle = _obstacle(uri)
    match config.tracking.send:
        case "never":
            return Sending(False, f"MLflow: nothing is sent to {shown} while the job runs (tracking.send=never)")
        case "always" if obstacle:
            return Sending(True, f"MLflow: sent to {shown}, although {obstacle} (tracking.send=always)")
        case "auto" if obstacle:
            return Sending(
                False,
                f"MLflow: nothing is sent to {shown} while the job runs, because {obstacle}; set tracking.send=always "
                "to send it anyway, or set tracking.uri to a server",
            )
    return Sending(True, f"MLflow: sent to {shown} while the job runs")


def _obstacle(uri: str) -> str | None:
    """Return why a job must not write to the store; None if it may."""
    file = file_of(uri)
    if file is None:
        return None
    if "SLURM_ARRAY_JOB_ID" in (job := slurm_job()):
        return f"the tasks of array {job['SLURM_ARRAY_JOB_ID']} would lock each other out of that file"
    kind = file_system_of(file.parent)
    if is_network_file_system(kind):
        return f"{file.parent.resolve()} is on a network file system ({kind}), where SQLite breaks"
    return None


def warn_of_folder(uri: str) -> str | None:
    """Return a warning if MLflow would keep the files of a local store's runs outside of the working directory."""
    folder = str(Path.cwd())
    if not is_local(uri) or unquote(folder) == folder:
        return None
    return (
        f"warning: MLflow reads % in the name of the working directory {folder} as a code, and keeps the files of runs "
        f"in {unquote(folder)}/mlruns; start in a folder without %"
    )


def file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store, or meta.yaml of MLflow's old file store; None for servers and databases.

    SQLAlchemy, through which MLflow reads the address of an SQLite file, takes %20 for a blank and %25 for a %.
    """
    scheme, _, path = uri.partition(":")
    if scheme == "sqlite" or scheme.startswith("sqlite+"):
        name = path.removeprefix("///").partition("?")[0]
        return Path(unquote(name)) if path.startswith("///") and name else None
    if scheme == "file":
        return Path(urlsplit(uri).path) / "meta.yaml"
    return Path(uri) / "meta.yaml" if "://" not in uri and scheme != "databricks" else None


def read_run_id(run_dir: Path) -> str | None:
    """Return the MLflow run of a run directory; None before it has one. Raises UnusableError if it is no id."""
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return _checked(text, str(path), "write the id of the run into it, or delete it: the run is found by its log")


def requested_run_id() -> str | None:
    """Return the run of MLFLOW_RUN_ID, or None. Raises UnusableError if its value is no id."""
    text = mlflow_environment().run_id
    return text and _checked(text, "environment: MLFLOW_RUN_ID", "unset it to create a new run")


def settle_run_id(run_dir: Path, of_checkpoint: str | None, *, report: Callable[[str], None]) -> None:
    """Store the run to use in the run directory, if it, the checkpoint or the user names one.

    Raises:
        UnusableError: one of them is no id.
    """
    stored, requested = read_run_id(run_dir), requested_run_id()
    known = stored
    if known is None and of_checkpoint:
        known = _checked(of_checkpoint, "mlflow_run_id in the checkpoint's manifest.json", f"write it to {RUN_ID_FILE}")
    if known and requested and known != requested:
        report(f"MLFLOW_RUN_ID is {requested}, but {run_dir} continues its MLflow run {known}")
    if stored is None and (known or requested):
        write_text(run_dir / RUN_ID_FILE, f"{known or requested}\n")


def _checked(text: str, where: str, fix: str) -> str:
    if _RUN_ID.fullmatch(text):
        return text
    raise UnusableError(
        f"{where} is {text[:60]!r}, but the id of an MLflow run has letters and digits only, 32 as a rule; {fix}"
    )

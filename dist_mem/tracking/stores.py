"""Choose the MLflow store and experiment of a run, and whether a job sends to the store while it runs.

A server accepts data from many jobs at the same time. An SQLite file does not: on a network file system its locks do
not work, and the tasks of an array lock each other out. There a job only writes its journal, and `dist-mem track sync`
sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment, slurm_job
from dist_mem.runtime.files import file_system_of, is_network_file_system
from dist_mem.tracking.provenance import without_credentials

_SCHEMES = ("http", "https", "sqlite", "mysql", "postgresql", "mssql", "file", "databricks")
DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "dist_mem"


class Sending(NamedTuple):
    """Whether a job sends to MLflow, and why."""

    is_on: bool
    message: str  # one line for the user


def store_uri(config: Any) -> str:
    """Return `tracking.uri`, else MLFLOW_TRACKING_URI, else a file in the current directory."""
    return config.tracking.uri or mlflow_environment().uri or DEFAULT_URI


def is_named_by_user(config: Any, overrides: Sequence[str] = ()) -> bool:
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


def check_scheme(uri: str) -> None:
    """Raise UnusableError if neither MLflow nor one of its plugins has stores of this kind of address."""
    scheme, found, _ = uri.partition("://")
    offered = entry_points(group="mlflow.tracking_store").names
    if found and scheme.partition("+")[0] not in (*_SCHEMES, *offered):
        raise UnusableError(
            f"tracking.uri is {without_credentials(uri)!r}, but MLflow has no stores of the kind {scheme!r}; give one "
            f"of {', '.join(_SCHEMES)}, or a folder"
        )


def is_server(uri: str) -> bool:
    """Whether the store is reached through an HTTP server."""
    return urlsplit(uri).scheme in ("http", "https")


def experiment_of(config: Any) -> dict[str, str]:
    """Return {"name": ...} or {"id": ...}: from the configuration, else the environment, else the default."""
    environment = mlflow_environment()
    name = config.tracking.experiment or environment.experiment_name
    if environment.experiment_id and not name:
        return {"id": environment.experiment_id}
    return {"name": name or DEFAULT_EXPERIMENT}


def choose_sending(config: Any) -> Sending:
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
    file = _file_of(uri)
    if file is None:
        return None
    if "SLURM_ARRAY_JOB_ID" in (job := slurm_job()):
        return f"the tasks of array {job['SLURM_ARRAY_JOB_ID']} would lock each other out of that file"
    kind = file_system_of(file.parent)
    if is_network_file_system(kind):
        return f"{file.parent.resolve()} is on a network file system ({kind}), where SQLite breaks"
    return None


def _file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store, or meta.yaml of MLflow's old file store; None for servers and databases."""
    scheme, _, path = uri.partition(":")
    if scheme == "sqlite" or scheme.startswith("sqlite+"):
        return Path(path.removeprefix("///").partition("?")[0]) if len(path) > len("///") else None
    if scheme == "file":
        return Path(urlsplit(uri).path) / "meta.yaml"
    return Path(uri) / "meta.yaml" if "://" not in uri and scheme != "databricks" else None

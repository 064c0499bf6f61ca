"""Which MLflow store and experiment a run goes to, and whether anything is sent there while a job runs.

A server takes what many jobs send at once. An SQLite file does not: on a network file system its locks are not held,
and the tasks of an array lock each other out. There a job writes its journal only, and `dist-mem track sync` sends it.
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
    told: str  # one line for the user


def store_uri(config: Any) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else a file here."""
    return config.tracking.uri or mlflow_environment().uri or DEFAULT_URI


def is_named_by_user(config: Any, overrides: Sequence[str] = ()) -> bool:
    """Whether the store of a run's own configuration is one that its user names too, or the default.

    Args:
        overrides: of the command line, which `config` has already; a file of the user's counts as `tracking.uri=...`.
    """
    is_given = any(override.startswith("tracking.uri=") for override in overrides)
    return is_given or store_uri(config) in (mlflow_environment().uri, DEFAULT_URI)


def is_local(uri: str) -> bool:
    """Whether a store is a file or a folder here, and no server or database that a client logs in to."""
    scheme = urlsplit(uri).scheme
    return (scheme in ("", "file") and uri != "databricks") or scheme == "sqlite"


def check_scheme(uri: str) -> None:
    """Raise UnusableError for an address of a kind of store that neither MLflow nor a plugin of it has."""
    scheme, found, _ = uri.partition("://")
    offered = entry_points(group="mlflow.tracking_store").names
    if found and scheme.partition("+")[0] not in (*_SCHEMES, *offered):
        raise UnusableError(
            f"tracking.uri is {without_credentials(uri)!r}, but MLflow has no stores of the kind {scheme!r}; give one "
            f"of {', '.join(_SCHEMES)}, or a folder"
        )


def is_server(uri: str) -> bool:
    """Whether an HTTP server is between us and the store."""
    return urlsplit(uri).scheme in ("http", "https")


def experiment_of(config: Any) -> dict[str, str]:
    """{"name": ...} or {"id": ...}, of the configuration, else of the environment, else our own."""
    environment = mlflow_environment()
    name = config.tracking.experiment or environment.experiment_name
    if environment.experiment_id and not name:
        return {"id": environment.experiment_id}
    return {"name": name or DEFAULT_EXPERIMENT}


def choose_sending(config: Any) -> Sending:
    """What `tracking.send` means here: for this store, on this file system, in this kind of job."""
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
                f"MLflow: nothing is sent to {shown} while the job runs, because {obstacle}; tracking.send=always "
                "sends it all the same, tracking.uri names a server",
            )
    return Sending(True, f"MLflow: sent to {shown} while the job runs")


def _obstacle(uri: str) -> str | None:
    """Why a store would break if a job wrote to it; None if it would not."""
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
    """The file of an SQLite store, or the folder of MLflow's old store of files; None for servers and databases."""
    scheme, _, path = uri.partition(":")
    if scheme == "sqlite" or scheme.startswith("sqlite+"):
        return Path(path.removeprefix("///").partition("?")[0]) if len(path) > len("///") else None
    if scheme == "file":
        return Path(urlsplit(uri).path) / "meta.yaml"
    return Path(uri) / "meta.yaml" if "://" not in uri and scheme != "databricks" else None

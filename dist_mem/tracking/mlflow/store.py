"""Choose the MLflow store, experiment and run of a run directory, and check that MLflow accepts a job.

A server accepts data from many jobs at the same time. An SQLite file does not: on a network file system its locks do
not work, and the tasks of an array lock each other out. There a job only writes its log, and `dist-mem track sync`
sends it. The run is that of RUN/mlflow_run_id, of the checkpoint, or of MLFLOW_RUN_ID, in this order.

MLflow is asked before a job uses GPUs for hours. A server that is down, slow or unreachable does not stop the job:
everything is kept, and sent when the server is back. A refusal does stop it, because it is permanent. No message
contains a secret.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dist_mem.config import Config, TrackingConfig
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment, slurm_job
from dist_mem.runtime.files import file_system_of, is_missing, is_network_file_system, read_regular, write_text
from dist_mem.tracking.log import METRICS_FILE, Header, read_header
from dist_mem.tracking.mlflow.client import (
    brief,
    check_experiment,
    connect,
    file_of,
    find_run,
    import_mlflow_quietly,
    stage_of,
    what_to_set,
)
from dist_mem.tracking.provenance import without_credentials

RUN_ID_FILE = "mlflow_run_id"  # in the run directory
DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "dist_mem"
_SCHEMES = ("http", "https", "sqlite", "mysql", "postgresql", "mssql", "file", "databricks")
_RUN_ID = re.compile(r"[a-zA-Z0-9][\w-]{0,255}", re.ASCII)
SECONDS = 2.5  # with the wait at the end of a job, a server that never answers costs less than 10
_LOCAL_SECONDS = 30.0  # to load what opens a local store, from a slow disk; another program may lock its file longer


class Sending(NamedTuple):
    """Whether a job sends to MLflow, and why."""

    is_on: bool
    message: str  # one line for the user


def store_uri(tracking: TrackingConfig) -> str:
    """Return `tracking.uri`, else MLFLOW_TRACKING_URI, else a file in the current directory."""
    return tracking.uri or mlflow_environment().uri or DEFAULT_URI


def is_named_by_user(tracking: TrackingConfig, overrides: Sequence[str] = ()) -> bool:
    """Whether the store in a run's configuration is also named by the user, or is the default.

    Args:
        overrides: of the command line, already in `config`; a user's configuration file counts as `tracking.uri=...`.
    """
    is_given = any(override.startswith("tracking.uri=") for override in overrides)
    return is_given or store_uri(tracking) in (mlflow_environment().uri, DEFAULT_URI)


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


def experiment_of(tracking: TrackingConfig, header: Header | None = None) -> Mapping[str, str]:
    """Return {"name": ...} or {"id": ...}: from the configuration, else the log, the environment, the default.

    Args:
        header: of the log, if there is one. `tracking.experiment` may be set later, before MLflow has the run.
    """
    if header is not None and header.experiment is not None and not tracking.experiment:
        return header.experiment
    environment = mlflow_environment()
    name = tracking.experiment or environment.experiment_name
    if environment.experiment_id and not name:
        return {"id": environment.experiment_id}
    return {"name": name or DEFAULT_EXPERIMENT}


def choose_sending(tracking: TrackingConfig) -> Sending:
    """Resolve `tracking.send` for this store, file system and kind of job."""
    uri = store_uri(tracking)
    shown = without_credentials(uri)
    obstacle = _obstacle(uri)
    match tracking.send:
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


def read_run_id(run_dir: Path) -> str | None:
    """Return the MLflow run of a run directory; None before it has one. Raises UnusableError if it is no id."""
    path = run_dir / RUN_ID_FILE
    if is_missing(path):
        return None
    text = read_regular(path).decode(errors="replace").strip()
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


def check_tracking(config: Config, run_dir: Path) -> str | None:
    """Check the store of a job that is to send to it; ask it once, for a few seconds at most.

    Returns:
        Why a store does not answer; None if it grants access, or if the job sends nothing.

    Raises:
        UnusableError: the store's address or the id of the MLflow run is invalid, MLflow has no such store, the server
            refuses this user (401, 403), its certificate is not trusted, or the experiment is deleted or absent. The
            message names what to set.
    """
    if not config.tracking.mlflow:
        return None
    run_id = read_run_id(run_dir) or requested_run_id()
    uri, log = store_uri(config.tracking), run_dir / METRICS_FILE
    check_store(uri)
    if not ((is_server(uri) or is_local(uri)) and choose_sending(config.tracking).is_on) or is_missing_file(uri):
        return None
    import_mlflow_quietly()  # not in the thread: a slow import must not use up SECONDS
    experiment = experiment_of(config.tracking, read_header(log) if log.exists() else None)
    result: list[Exception | None] = []

    def ask() -> None:
        try:
            (ask_for_access if is_server(uri) else _look_into)(uri, experiment, run_id)
            result.append(None)
        except Exception as error:  # of any library under MLflow's client
            result.append(error)

    thread = threading.Thread(target=ask, name="MLflow preflight", daemon=True)
    thread.start()
    seconds = SECONDS if is_server(uri) else _LOCAL_SECONDS
    thread.join(seconds)
    if not result:
        return f"no answer within {seconds} s"
    if result[0] is None:
        return None
    if refusal := what_to_set(result[0]) or (isinstance(result[0], UnusableError) and str(result[0])):
        raise UnusableError(
            f"MLflow at {without_credentials(uri)} cannot be used: {refusal}. Or set tracking.send=never"
        )
    return brief(result[0])


def was_tracked(run_dir: Path) -> bool:
    """Whether a start of a run was tracked with MLflow; its data are kept, whatever MLflow says now."""
    if (run_dir / RUN_ID_FILE).exists():
        return True
    with suppress(OSError, UnusableError):
        return read_header(run_dir / METRICS_FILE).experiment is not None
    return False


def ask_for_access(uri: str, experiment: Mapping[str, str], run_id: str | None) -> None:
    """Send a server the requests that a run will need, with the user's credentials, without changing anything there.

    Args:
        run_id: the run to continue; None: a new run of the experiment.

    Raises:
        MlflowException: the server does not answer, or its status is 401, 403 or another refusal.
        UnusableError: the experiment is deleted or absent.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    def ask(endpoint: str, method: str, **content: Any) -> Any:
        path = f"/api/2.0/mlflow/{endpoint}"
        response = http_request(host_creds=get_default_host_creds(uri), endpoint=path, method=method, **content)
        if response.status_code in (400, 404):  # access was granted
            return None
        return verify_rest_response(response, path).json()

    if run_id is not None and ask("runs/log-batch", "POST", json={"run_id": run_id}) is not None:
        return
    key = f"experiment_{'id' if 'id' in experiment else 'name'}"
    endpoint = "experiments/get" if "id" in experiment else "experiments/get-by-name"
    found = (ask(endpoint, "GET", params={key: next(iter(experiment.values()))}) or {}).get("experiment")
    check_experiment(experiment, None if found is None else found.get("lifecycle_stage"))
    if found is not None:  # an invalid request for a new run: the server checks permissions first
        ask("runs/create", "POST", json={"experiment_id": found["experiment_id"], "start_time": "never"})


def _look_into(uri: str, experiment: Mapping[str, str], run_id: str | None) -> None:
    """Check the experiment of a local store, as `ask_for_access` does that of a server."""
    client = connect(uri)
    if run_id is None or find_run(client, run_id) is None:
        check_experiment(experiment, stage_of(client, experiment))

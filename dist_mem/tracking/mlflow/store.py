"""Choose the MLflow store, experiment and run of a run directory, and check that MLflow accepts a job.

A store is used only if the user names it, or if it is the default: the configuration in a run directory may come from
anybody. So may RUN/mlflow_run_id, which is compared with the log that MLflow's run has by its own tag.

A server accepts data from many jobs at the same time. An SQLite file does not: on a network file system its locks do
not work, and the tasks of an array lock each other out. There a job only writes its log, and `dist-mem track sync`
sends it. The run is that of RUN/mlflow_run_id, of MLFLOW_RUN_ID, or the one that has the log, in this order.

MLflow is asked before a job uses GPUs for hours. A server that is down, slow or unreachable does not stop the job:
everything is kept, and sent when the server is back. A refusal does stop it, because it is permanent. No message
contains a secret.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dist_mem.config import TrackingConfig
from dist_mem.config.blocks import value_at
from dist_mem.config.sources import read_sources
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment, slurm_job
from dist_mem.runtime.file_systems import file_system_of, is_network_file_system
from dist_mem.runtime.files import is_missing, read_regular, write_text
from dist_mem.tracking.log import METRICS_FILE, Header, read_header
from dist_mem.tracking.mlflow.client import (
    check_experiment,
    connect,
    find_run,
    first_line,
    import_mlflow_quietly,
    remedy_for,
    stage_of,
)
from dist_mem.tracking.mlflow.database import ForeignError, file_of
from dist_mem.tracking.provenance import without_credentials

RUN_ID_FILE = "mlflow_run_id"  # in the run directory
UID_TAG = "dist_mem.uid"  # of a run: the id of the log whose entries it has
DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "dist_mem"
_SCHEMES = ("http", "https", "sqlite", "mysql", "postgresql", "mssql", "file", "databricks")
_RUN_ID = re.compile(r"[a-zA-Z0-9][\w-]{0,255}", re.ASCII)
SECONDS = 2.5  # with the wait at the end of a job, a server that never answers costs less than 10
_LOCAL_SECONDS = 30.0  # to load what opens a local store, from a slow disk; another program may lock its file longer


class SendingChoice(NamedTuple):
    """Whether a job sends to MLflow, and why."""

    is_on: bool
    message: str  # one line for the user


def store_uri(tracking: TrackingConfig) -> str:
    """Return `tracking.uri`, else MLFLOW_TRACKING_URI, else a file in the current directory."""
    return tracking.uri or mlflow_environment().uri or DEFAULT_URI


def is_named_by_user(tracking: TrackingConfig, overrides: Sequence[str] = ()) -> bool:
    """Return whether the user names the store in a run's configuration, on the command line or in the environment.

    Args:
        overrides: of the command line, and files of the user, already in `tracking`.
    """
    is_given = any(value_at(source.tree, "tracking.uri") for source in read_sources(overrides))
    return is_given or store_uri(tracking) == mlflow_environment().uri


def sync_command(tracking: TrackingConfig, run_dir: Path) -> str:
    """Return the command that sends a run, with its store unless `is_named_by_user` or the default."""
    uri = store_uri(tracking)
    is_found = uri == DEFAULT_URI or is_named_by_user(tracking)
    store = [] if is_found else [f"tracking.uri={without_credentials(uri)}"]
    return shlex.join(["dist-mem", "track", "sync", str(run_dir), *store])


def check_named(tracking: TrackingConfig, run_dir: Path, *, is_named: bool) -> None:
    """Check that the store is the default unless the user names it. Raises UnusableError, with how to name it."""
    uri = store_uri(tracking)
    if not (is_named or uri == DEFAULT_URI):
        shown = without_credentials(uri)
        raise UnusableError(
            f"only the configuration in {run_dir} names the MLflow store {shown}; to use it, give "
            f"tracking.uri={shown}, or set MLFLOW_TRACKING_URI"
        )


def check_place(uri: str, place: str | None, *, is_named: bool) -> None:
    """Check that files go below the working directory, unless the user names the store.

    That of the default store does; but the file of that store, in the working directory, may come from anybody.

    Args:
        place: where MLflow keeps the files of a run or an experiment.

    Raises:
        UnusableError: they go elsewhere.
    """
    from mlflow.utils.file_utils import local_file_uri_to_path

    is_on_disk = urlsplit(place or "").scheme in ("", "file")
    is_here = is_on_disk and Path(local_file_uri_to_path(place or "")).resolve().is_relative_to(Path.cwd())
    if not (is_named or is_here):
        raise UnusableError(
            f"MLflow at {uri} keeps its files at {without_credentials(place or '')}, which is outside of the working "
            f"directory; to send them there, name the store: tracking.uri={uri}"
        )


def is_local(uri: str) -> bool:
    """Whether a store is a local file or folder, not a server or database that a client logs in to."""
    scheme = urlsplit(uri).scheme
    return (scheme in ("", "file") and uri != "databricks") or scheme == "sqlite"


def check_store(uri: str, *, is_here: bool = True) -> None:
    """Check the address of a store, without connecting to it.

    Args:
        is_here: this machine has the folders of the one that uses the store.

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
    if is_here and scheme.startswith("sqlite") and file and ":" not in str(file) and not file.parent.exists():
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


def choose_sending(tracking: TrackingConfig) -> SendingChoice:
    """Resolve `tracking.send` for this store, file system and kind of job."""
    uri = store_uri(tracking)
    shown = without_credentials(uri)
    obstacle = _obstacle(uri)
    match tracking.send:
        case "never":
            return SendingChoice(False, f"MLflow: nothing is sent to {shown} while the job runs (tracking.send=never)")
        case "always" if obstacle:
            return SendingChoice(True, f"MLflow: sent to {shown}, although {obstacle} (tracking.send=always)")
        case "auto" if obstacle:
            return SendingChoice(
                False,
                f"MLflow: nothing is sent to {shown} while the job runs, because {obstacle}; set tracking.send=always "
                "to send it anyway, or set tracking.uri to a server",
            )
    return SendingChoice(True, f"MLflow: sent to {shown} while the job runs")


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


def read_run_id(run_dir: Path) -> str | None:
    """Return the MLflow run of a run directory; None before it has one. Raises UnusableError if it is no id."""
    path = run_dir / RUN_ID_FILE
    if is_missing(path):
        return None
    text = read_regular(path).decode(errors="replace").strip()
    return _check_run_id(text, str(path), "write the id of the run into it, or delete it: the run is found by its log")


def requested_run_id() -> str | None:
    """Return the run of MLFLOW_RUN_ID, or None. Raises UnusableError if its value is no id."""
    text = mlflow_environment().run_id
    return text and _check_run_id(text, "environment: MLFLOW_RUN_ID", "unset it to create a new run")


def settle_run_id(run_dir: Path, *, report: Callable[[str], None]) -> None:
    """Store the run of MLFLOW_RUN_ID in the run directory unless that has one.

    Raises:
        UnusableError: one of them is no id.
    """
    stored, requested = read_run_id(run_dir), requested_run_id()
    if stored and requested and stored != requested:
        report(f"MLFLOW_RUN_ID is {requested}, but {run_dir} continues its MLflow run {stored}")
    if requested and stored is None:
        write_text(run_dir / RUN_ID_FILE, f"{requested}\n")


def check_owner(run_id: str, tags: Mapping[str, str], uid: str | None, run_dir: Path) -> None:
    """Check that a run has the log of a run directory, or that it has none yet and the user names it.

    Args:
        tags: of the run.
        uid: of the log; None: there is no log yet.

    Raises:
        ForeignError: it has another log, or none although only a file names it; it may be anybody's.
    """
    owner, is_requested = tags.get(UID_TAG), run_id == requested_run_id()
    if owner == uid if owner else is_requested:
        return
    path = run_dir / RUN_ID_FILE
    remedies = ["unset MLFLOW_RUN_ID"] * is_requested + [f"remove the file {path}"] * path.exists()
    raise ForeignError(
        f"MLflow run {run_id} has {f'the log {owner}' if owner else 'no log of dist_mem'}, and {run_dir} has "
        f"{f'the log {uid}' if uid else 'none yet'}; {' and '.join(remedies)}: a new run is made"
        + ("" if owner else f"; or set MLFLOW_RUN_ID={run_id}")
    )


def _check_run_id(text: str, where: str, fix: str) -> str:
    if _RUN_ID.fullmatch(text):
        return text
    raise UnusableError(
        f"{where} is {text[:60]!r}, but the id of an MLflow run has letters and digits only, 32 as a rule; {fix}"
    )


def check_tracking(tracking: TrackingConfig, run_dir: Path) -> str | None:
    """Check the store of a job that is to send to it; ask it once, for a few seconds at most.

    Returns:
        Why a store does not answer; None if it grants access, or if the job sends nothing.

    Raises:
        ForeignError: the store is no database of MLflow, or its run has another log.
        UnusableError: the store's address or the id of the MLflow run is invalid, MLflow has no such store, the server
            refuses this user (401, 403), its certificate is not trusted, or the experiment is deleted or absent. The
            message names what to set.
    """
    if not tracking.mlflow:
        return None
    run_id = read_run_id(run_dir) or requested_run_id()
    uri, log = store_uri(tracking), run_dir / METRICS_FILE
    check_store(uri)
    if not ((is_server(uri) or is_local(uri)) and choose_sending(tracking).is_on) or is_missing_file(uri):
        return None
    import_mlflow_quietly()  # not in the thread: a slow import must not use up SECONDS
    header = read_header(log) if log.exists() else None
    experiment = experiment_of(tracking, header)

    def check(run_id: str, tags: Mapping[str, str]) -> None:
        check_owner(run_id, tags, header and header.uid, run_dir)

    result: list[Exception | None] = []

    def ask() -> None:
        try:
            (ask_for_access if is_server(uri) else _look_into)(uri, experiment, run_id, check)
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
    if isinstance(result[0], ForeignError):
        raise result[0]
    if refusal := remedy_for(result[0]) or (isinstance(result[0], UnusableError) and str(result[0])):
        raise UnusableError(
            f"MLflow at {without_credentials(uri)} cannot be used: {refusal}. Or set tracking.send=never"
        )
    return first_line(result[0])


def was_tracked(run_dir: Path) -> bool:
    """Whether a start of a run was tracked with MLflow; its data are kept, whatever MLflow says now."""
    if (run_dir / RUN_ID_FILE).exists():
        return True
    with suppress(OSError, UnusableError):
        return read_header(run_dir / METRICS_FILE).experiment is not None
    return False


CheckOwner = Callable[[str, Mapping[str, str]], None]  # of a run: its id and tags


def ask_for_access(uri: str, experiment: Mapping[str, str], run_id: str | None, check: CheckOwner) -> None:
    """Send a server the requests that a run will need, with the user's credentials, without changing anything there.

    Args:
        run_id: the run to continue; None: a new run of the experiment.
        check: checks that the run is the one of this job, if it exists.

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

    if run_id is not None and (answer := ask("runs/get", "GET", params={"run_id": run_id})) is not None:
        if (run := answer["run"])["info"]["lifecycle_stage"] == "active":
            check(run_id, {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])})
        if ask("runs/log-batch", "POST", json={"run_id": run_id}) is not None:
            return
    key = f"experiment_{'id' if 'id' in experiment else 'name'}"
    endpoint = "experiments/get" if "id" in experiment else "experiments/get-by-name"
    found = (ask(endpoint, "GET", params={key: next(iter(experiment.values()))}) or {}).get("experiment")
    check_experiment(experiment, None if found is None else found.get("lifecycle_stage"))
    if found is not None:  # an invalid request for a new run: the server checks permissions first
        ask("runs/create", "POST", json={"experiment_id": found["experiment_id"], "start_time": "never"})


def _look_into(uri: str, experiment: Mapping[str, str], run_id: str | None, check: CheckOwner) -> None:
    """Check the run or the experiment of a local store, as `ask_for_access` does those of a server."""
    client = connect(uri)
    run = None if run_id is None else find_run(client, run_id)
    if run is None:
        check_experiment(experiment, stage_of(client, experiment))
    else:
        check(run.info.run_id, run.data.tags)

"""MLflow's client: open a store, find runs and experiments in it, and what its errors mean.

Every module imports mlflow through this one, quietly, and opens stores with `connect`: MLflow's own client creates its
tables in whatever database it gets.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_credentials_set, quiet_tracking_environment
from dist_mem.tracking.log import LogError
from dist_mem.tracking.mlflow.database import prepare

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_SERVER_CERTIFICATE, _CLIENT_CERTIFICATE = "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH"
MLFLOW_LOGGER = "mlflow.store.db.utils"


def is_refusal(error: Exception) -> bool:
    """Whether MLflow will never accept this entry: a bad value, a deleted run, a file that is missing or too large."""
    return _status_of(error) in (400, 404, 413) or isinstance(error, (FileNotFoundError, LogError))


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status of an error of MLflow's client, which sends files through requests; None without one."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, HTTPError):
        return None if error.response is None else int(error.response.status_code)
    return int(error.get_http_status_code()) if isinstance(error, MlflowException) else None


def first_line(error: Exception) -> str:
    """Return an error in one line, without the user and password of URLs in the messages of MLflow's client."""
    if refusal := remedy_for(error):
        return refusal
    line = re.sub(r"//[^/\s]*@", "//", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {line[:300]}"


def remedy_for(error: Exception) -> str | None:
    """Return why a server refuses access, and what the user can do; None if the error is no refusal."""
    status, text = _status_of(error), str(error)
    if status == 401:
        given = " and ".join(mlflow_credentials_set())
        reason = f"it refuses {given}" if given else "it requires credentials"
        variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"401: {reason}; set {variables}, or ~/.mlflow/credentials"
    if status == 403:
        reason = "403: the user is known, but may not write to this experiment or run"
        return f"{reason}; ask for the permission EDIT, or set tracking.experiment"
    if "407 Proxy Authentication" in text:
        return "407: the proxy of HTTPS_PROXY asks for a user and password: http://USER:PASSWORD@HOST:PORT"
    # An expired certificate is a temporary fault of the server, one that is not valid yet of a clock.
    if "CERTIFICATE_VERIFY_FAILED" in text and not re.search("expired|not yet valid", text):
        found = re.search(r"certificate verify failed: ([^(']*)", text)
        reason = f"its certificate is not trusted ({found[1].strip() if found else 'verify failed'})"
        return f"{reason}; set {_SERVER_CERTIFICATE} to the file of its CA, in PEM"
    if "CERTIFICATE_REQUIRED" in text:
        reason = "it asks for a certificate of the client"
        return f"{reason}; set {_CLIENT_CERTIFICATE} to a PEM file with certificate and key"
    if "TLS CA certificate bundle" in text:
        return f"{_SERVER_CERTIFICATE} names no file: {text.rpartition(': ')[2]}"
    if "TLS certificate file" in text:
        return f"{_CLIENT_CERTIFICATE} names no file: {text.rpartition(': ')[2]}"
    if "MLFLOW_ALLOW_FILE_STORE" in text:
        return "MLflow keeps no more runs in folders; set tracking.uri=sqlite:///mlflow.db, or a server"
    if "MLFLOW_TRACKING_INSECURE_TLS" in text:
        return f"MLFLOW_TRACKING_INSECURE_TLS and {_SERVER_CERTIFICATE} are both set; unset one of them"
    return None


def import_mlflow_quietly() -> None:
    """Import mlflow (about 1 s) and silence messages that do not concern users."""
    quiet_tracking_environment()
    import mlflow  # noqa: F401

    # "Creating initial MLflow database tables", "Updating database tables": the user need not know or do anything.
    logging.getLogger(MLFLOW_LOGGER).setLevel(logging.WARNING)
    # MLflow's own table definitions use a deprecated SQLAlchemy option.
    warnings.filterwarnings(
        "ignore", message=r"The ``noload`` loader strategy is deprecated", category=DeprecationWarning
    )


def connect(uri: str) -> MlflowClient:
    """Return the client of a store and of its registry; `prepare` creates the tables of a new SQLite file (1 to 7 s).

    Raises:
        ForeignError: the SQLite file is no database of MLflow.
        Exception: any other error of `prepare` and of MLflow's client.
    """
    import_mlflow_quietly()
    from mlflow import MlflowClient

    prepare(uri)
    return MlflowClient(uri, uri)  # not the registry of the process


def client_tags() -> dict[str, str]:
    """Return the tags that every MLflow client and its plugins set.

    Without mlflow.user: MLflow uses the login name of MLFLOW_TRACKING_USERNAME (provenance.py has the machine's user).
    """
    import_mlflow_quietly()
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    ignore: Any = [GitRunContext]  # MLflow declares a list of instances, and takes classes
    return {name: value for name, value in resolve_tags(ignore=ignore).items() if name != "mlflow.user"}


def find_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return the run; None if the store does not have it or the user has deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.get_http_status_code() == 404:
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def experiment_id_of(client: MlflowClient, experiment: Mapping[str, str]) -> str:
    """Return the id of the experiment, which is created if none has the name.

    Raises:
        UnusableError: as `check_experiment`.
    """
    from mlflow.exceptions import MlflowException

    found = _find_experiment(client, experiment)
    check_experiment(experiment, None if found is None else found.lifecycle_stage)
    if found is None:
        try:
            return client.create_experiment(experiment["name"])
        except MlflowException:
            found = _find_experiment(client, experiment)  # another job may have created it in between
            if found is None:
                raise
    return str(found.experiment_id)


def _find_experiment(client: MlflowClient, experiment: Mapping[str, str]) -> Any:
    from mlflow.exceptions import MlflowException

    if "name" in experiment:
        return client.get_experiment_by_name(experiment["name"])
    try:
        return client.get_experiment(experiment["id"])
    except MlflowException as error:
        if error.get_http_status_code() in (400, 404):  # an id that cannot be one, or is of none
            return None
        raise


def stage_of(client: MlflowClient, experiment: Mapping[str, str]) -> str | None:
    """Return "active" or "deleted"; None if the store has no such experiment."""
    found = _find_experiment(client, experiment)
    return None if found is None else str(found.lifecycle_stage)


def check_experiment(experiment: Mapping[str, str], stage: str | None) -> None:
    """Check that an experiment can have a new run, or can be created.

    Args:
        stage: in MLflow: "active" or "deleted"; None: there is no such experiment.

    Raises:
        UnusableError: it is deleted, or none has the id.
    """
    if stage is None and "name" not in experiment:
        raise UnusableError(
            f"there is no experiment with the id {experiment['id']!r} (MLFLOW_EXPERIMENT_ID); set "
            "tracking.experiment=NAME"
        )
    if stage not in (None, "active"):
        (kind, value), *_ = experiment.items()
        raise UnusableError(
            f"the experiment with the {kind} {value!r} is deleted; set tracking.experiment=NAME, or restore it: mlflow "
            "experiments restore"
        )

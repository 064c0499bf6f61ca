"""Check that MLflow's server accepts a job before it uses GPUs for hours, and explain the errors of MLflow's client.

A server that is down, slow or unreachable does not stop the job: everything is kept, and sent when the server is back.
A refusal does stop it, because it is permanent. No message contains a secret.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_mem.config import Config
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_credentials_set
from dist_mem.tracking.journal import JournalError
from dist_mem.tracking.mlflow_run import import_mlflow_quietly
from dist_mem.tracking.provenance import without_credentials
from dist_mem.tracking.stores import (
    check_store,
    choose_sending,
    experiment_of,
    is_server,
    read_run_id,
    requested_run_id,
    store_uri,
)

SECONDS = 2.5  # with the wait at the end of a job, a server that never answers costs less than 10
_SERVER_CERTIFICATE, _CLIENT_CERTIFICATE = "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH"


def check_tracking(config: Config, run_dir: Path) -> str | None:
    """Check the store of a job that is to send to it; ask a server once, for a few seconds at most.

    Returns:
        Why a server does not answer; None if it grants access, or if no server is used.

    Raises:
        UnusableError: the store's address or the id of the MLflow run is invalid, the server refuses this user (401,
            403), or its certificate is not trusted. The message names what to set.
    """
    if not config.tracking.mlflow:
        return None
    run_id = read_run_id(run_dir) or requested_run_id()
    uri = store_uri(config)
    check_store(uri)
    if not (is_server(uri) and choose_sending(config).is_on):
        return None
    import_mlflow_quietly()  # not in the thread: a slow import must not use up SECONDS
    result: list[Exception | None] = []

    def ask() -> None:
        try:
            ask_for_access(uri, experiment_of(config), run_id)
            result.append(None)
        except Exception as error:  # of any library under MLflow's client
            result.append(error)

    thread = threading.Thread(target=ask, name="MLflow preflight", daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not result:
        return f"no answer within {SECONDS} s"
    if result[0] is None:
        return None
    if refusal := what_to_set(result[0]):
        raise UnusableError(
            f"MLflow at {without_credentials(uri)} cannot be used: {refusal}. Or set tracking.send=never"
        )
    return brief(result[0])


def ask_for_access(uri: str, experiment: Mapping[str, str], run_id: str | None) -> None:
    """Send a server the requests that a run will need, with the user's credentials, without changing anything there.

    Args:
        run_id: the run to continue; None: a new run of the experiment.

    Raises:
        MlflowException: the server does not answer, or its status is 401, 403 or another refusal.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    def ask(endpoint: str, method: str, **content: Any) -> Any:
        path = f"/api/2.0/mlflow/{endpoint}"
        response = http_request(host_creds=get_default_host_creds(uri), endpoint=path, method=method, **content)
        if response.status_code in (400, 404):  # access was granted
            return {}
        return verify_rest_response(response, path).json()

    if run_id is not None:
        ask("runs/log-batch", "POST", json={"run_id": run_id})
        return
    key = f"experiment_{'id' if 'id' in experiment else 'name'}"
    endpoint = "experiments/get" if "id" in experiment else "experiments/get-by-name"
    found = ask(endpoint, "GET", params={key: next(iter(experiment.values()))}).get("experiment")
    if found is not None:  # an invalid request for a new run: the server checks permissions first
        ask("runs/create", "POST", json={"experiment_id": found["experiment_id"], "start_time": "never"})


def is_refusal(error: Exception) -> bool:
    """Whether MLflow will never accept this entry: a bad value, a deleted run, a missing file."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.get_http_status_code() in (400, 404)
    return isinstance(error, (FileNotFoundError, JournalError))


def brief(error: Exception) -> str:
    """Return an error in one line, without the user and password of URLs in the messages of MLflow's client."""
    if refusal := what_to_set(error):
        return refusal
    first_line = re.sub(r"//[^/\s]*@", "//", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {first_line[:300]}"


def what_to_set(error: Exception) -> str | None:
    """Return why a server refuses access, and what the user can do; None if the error is no refusal."""
    status, text = getattr(error, "get_http_status_code", lambda: None)(), str(error)
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
    if "MLFLOW_TRACKING_INSECURE_TLS" in text:
        return f"MLFLOW_TRACKING_INSECURE_TLS and {_SERVER_CERTIFICATE} are both set; unset one of them"
    return None

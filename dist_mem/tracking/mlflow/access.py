"""Check that MLflow accepts a job before it uses GPUs for hours.

A server that is down, slow or unreachable does not stop the job: everything is kept, and sent when the server is back.
A refusal does stop it, because it is permanent. No message contains a secret.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_mem.config import Config
from dist_mem.errors import UnusableError
from dist_mem.tracking.log import METRICS_FILE, read_header
from dist_mem.tracking.mlflow.errors import brief, what_to_set
from dist_mem.tracking.mlflow.run import (
    check_experiment,
    connect,
    find_run,
    import_mlflow_quietly,
    stage_of,
    target_of,
)
from dist_mem.tracking.mlflow.stores import (
    RUN_ID_FILE,
    check_store,
    choose_sending,
    experiment_of,
    is_local,
    is_missing_file,
    is_server,
    read_run_id,
    requested_run_id,
    store_uri,
)
from dist_mem.tracking.provenance import without_credentials

SECONDS = 2.5  # with the wait at the end of a job, a server that never answers costs less than 10
_LOCAL_SECONDS = 30.0  # to load what opens a local store, from a slow disk; another program may lock its file longer


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
    uri, log = store_uri(config), run_dir / METRICS_FILE
    check_store(uri)
    if not ((is_server(uri) or is_local(uri)) and choose_sending(config).is_on) or is_missing_file(uri):
        return None
    import_mlflow_quietly()  # not in the thread: a slow import must not use up SECONDS
    experiment: Mapping[str, str] = experiment_of(config)
    if log.exists():
        experiment = target_of(config, run_dir, read_header(log)).header.experiment or experiment
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

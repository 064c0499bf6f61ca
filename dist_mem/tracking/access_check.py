"""Check that MLflow's server accepts a job before it uses GPUs for hours. Rank 0 asks once, for a few seconds at most.

A server that is down, slow or unreachable does not stop the job: everything is kept, and sent when the server is back.
A refusal does stop it, because it is permanent.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dist_mem.errors import UnusableError
from dist_mem.tracking.mlflow_run import ask_for_access, import_mlflow_quietly
from dist_mem.tracking.provenance import without_credentials
from dist_mem.tracking.refusals import what_to_set
from dist_mem.tracking.run_id import read_run_id, requested_run_id
from dist_mem.tracking.stores import choose_sending, experiment_of, is_server, store_uri

SECONDS = 2.5  # with the wait at the end of a job, a server that never answers costs less than 10


def check_tracking(config: Any, run_dir: Path) -> None:
    """Return if tracking may start, also if the server does not answer.

    Raises:
        UnusableError: the server refuses this user (401, 403), its certificate is not trusted, or the id of the MLflow
            run is invalid. The message names what to set.
    """
    if not config.tracking.mlflow:
        return
    run_id = read_run_id(run_dir) or requested_run_id()
    uri = store_uri(config)
    if not (is_server(uri) and choose_sending(config).is_on):
        return
    refusal = _refusal(uri, experiment_of(config), run_id)
    if refusal is not None:
        raise UnusableError(
            f"MLflow at {without_credentials(uri)} cannot be used: {refusal}. Or set tracking.send=never"
        )


def _refusal(uri: str, experiment: dict[str, str], run_id: str | None) -> str | None:
    """Return why the server refuses access; None if it grants access or does not answer in time."""
    import_mlflow_quietly()  # not in the thread: a slow import must not use up SECONDS
    refusals: list[str] = []

    def ask() -> None:
        try:
            ask_for_access(uri, experiment, run_id)
        except Exception as error:  # of any library under MLflow's client; other errors are reported on sending
            refusal = what_to_set(error)
            if refusal is not None:
                refusals.append(refusal)

    thread = threading.Thread(target=ask, name="MLflow preflight", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return refusals[0] if refusals else None

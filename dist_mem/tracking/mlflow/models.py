"""Fetch an exported model from MLflow, from the artifacts of a run or from the registry of models."""

from __future__ import annotations

import atexit
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import mlflow_environment
from dist_mem.runtime.extras import require
from dist_mem.tracking.mlflow.errors import brief
from dist_mem.tracking.mlflow.run import import_mlflow_quietly
from dist_mem.tracking.mlflow.stores import DEFAULT_URI

SCHEMES = ("runs:/", "models:/")
_KEY = "tracking.uri="
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>.+))")


def is_mlflow(text: str) -> bool:
    """Return whether a text is the address of a model in MLflow."""
    return text.startswith(SCHEMES)


def fetch_model(address: str, overrides: Sequence[str] = ()) -> Path:
    """Return the local folder of an export that MLflow stores; a temporary one, as long as this process runs.

    Args:
        address: "runs:/ID/PATH", "models:/NAME/VERSION" or "models:/NAME@ALIAS", of an export or of a folder that
            contains one.
        overrides: with `tracking.uri=...`, the store; else it is that of MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.

    Raises:
        UnusableError: MLflow is not installed, cannot fetch it, or the folder contains no export, or several.
    """
    require("mlflow", address)
    import_mlflow_quietly()
    given = [text.removeprefix(_KEY) for text in overrides if isinstance(text, str) and text.startswith(_KEY)]
    folder = Path(mkdtemp(prefix="dist_mem-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _fetch(address, given[-1] if given else mlflow_environment().uri or DEFAULT_URI, folder)
    except Exception as error:  # any of the many libraries under MLflow's stores
        raise UnusableError(
            f"MLflow cannot fetch {address}: {brief(error)}; check the address, and give the store as tracking.uri=URL"
        ) from error
    exports = sorted(path.parent for path in folder.rglob("manifest.json"))
    if len(exports) != 1:
        some = f"has {len(exports)}: give the path of one" if exports else "has none: log the folder that export writes"
        raise UnusableError(f"{address}: an export is a folder with a manifest.json, and this address {some}")
    return exports[0]


def _fetch(address: str, store: str, folder: Path) -> None:
    """Copy the artifacts of an address into a folder."""
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    if registered := _REGISTERED.fullmatch(address):
        # MLflow's own function would look a registered model up in the registry of the process, not in this store.
        client, name = MlflowClient(store, store), registered["name"]
        version = registered["version"] or client.get_model_version_by_alias(name, registered["alias"]).version
        address = client.get_model_version_download_uri(name, version)
    download_artifacts(artifact_uri=address, dst_path=str(folder), tracking_uri=store)

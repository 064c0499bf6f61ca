"""Exported models in MLflow: log one as a model of its run, register it, and fetch one.

    dist-mem export runs/demo --out models/demo --mlflow --register demo --alias champion

The model is of MLflow's kind pyfunc: its files are those of the export, and `dist_mem/api/serving.py` loads them, for
`mlflow models serve`. A model version appears only after all files are stored.
"""

from __future__ import annotations

import atexit
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_mem.config import TrackingConfig, load_block
from dist_mem.errors import RunError, UnfitError, UnusableError
from dist_mem.runtime.extras import require
from dist_mem.tracking.log import METRICS_FILE, read_header
from dist_mem.tracking.mlflow.checkpoint_model import STEP_TAG
from dist_mem.tracking.mlflow.client import connect, find_run, first_line, import_mlflow_quietly, is_refusal, remedy_for
from dist_mem.tracking.mlflow.database import ForeignError
from dist_mem.tracking.mlflow.store import (
    UID_TAG,
    check_named,
    check_place,
    check_store,
    is_missing_file,
    is_named_by_user,
    requested_run_id,
    store_uri,
)
from dist_mem.tracking.provenance import without_credentials
from dist_mem.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LOADER = "dist_mem.api.serving"  # has _load_pyfunc(path); MLflow imports it where the model is loaded
_NAME = re.compile(r"[^/:@]*[^/:@\s][^/:@]*")  # without what ends the name in models:/NAME@ALIAS
_ALIAS = re.compile(r"(?!latest\Z|v[0-9]+\Z)[a-z0-9_-]{1,255}", re.IGNORECASE)  # MLflow reserves latest and v1
SCHEMES = ("runs:/", "models:/")
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>.+))")


class Registration(NamedTuple):
    """How an export is registered in MLflow."""

    name: str | None = None  # None: it is only logged
    alias: str | None = None  # that the new version gets


class ExportTarget(NamedTuple):
    """The MLflow run to which an export is logged."""

    client: MlflowClient
    run: Run
    uri: str  # of its store


def check_registration(wanted: Registration) -> None:
    """Check that MLflow is installed and that the names are valid, without connecting to a store.

    Raises:
        UnusableError: they are not; the message names the option.
    """
    require("mlflow", "export --mlflow")
    if wanted.name is not None and not _NAME.fullmatch(wanted.name):
        raise UnusableError(f"--register {wanted.name!r}: the name of a model is text without / : and @; give another")
    if wanted.alias is not None and not _ALIAS.fullmatch(wanted.alias):
        raise UnusableError(
            f"--alias {wanted.alias!r}: an alias has letters, digits, _ and - only, and is neither latest nor v1, v2, "
            "...; give another"
        )


def open_run(
    tracking: TrackingConfig, run_dir: Path, run_id: str | None, wanted: Registration, overrides: Sequence[str]
) -> ExportTarget:
    """Find the MLflow run of a trained model, without changing anything in the store.

    Args:
        tracking: of the run; its store is used if the user names it, or if it is the default.
        run_id: of the run; None: it has none.
        overrides: of the command line, already in `tracking`.

    Raises:
        UnusableError: there is no such run or store, or the store refuses the user or the name; or the run has another
            log.
        UnfitError: the store does not answer.
    """
    uri = store_uri(tracking)
    shown = without_credentials(uri)
    if run_id is None:
        raise UnusableError(
            "--mlflow: the model has no MLflow run to be logged to; send its run with dist-mem track sync RUN, or "
            "leave --mlflow out"
        )
    check_store(uri)
    is_named = is_named_by_user(tracking, overrides)
    check_named(tracking, run_dir, is_named=is_named)
    if is_missing_file(uri):
        raise UnusableError(f"--mlflow: there is no store {shown}; give that of the run as tracking.uri=URL")
    with _explain_errors(uri, "cannot be used"):
        client = connect(uri)
        run = find_run(client, run_id)
        if wanted.name is not None:
            _is_registered(client, wanted.name)
    if run is None:
        raise UnusableError(f"--mlflow: MLflow at {shown} has no run {run_id}; give its store as tracking.uri=URL")
    log = run_dir / METRICS_FILE
    uid = read_header(log).uid if log.exists() else None
    if run_id != requested_run_id() and (uid is None or run.data.tags.get(UID_TAG) != uid):
        raise ForeignError(
            f"--mlflow: MLflow run {run_id} at {shown} has another log than {run_dir}; to add the model to it, set "
            f"MLFLOW_RUN_ID={run_id}"
        )
    place = client.get_experiment(run.info.experiment_id).artifact_location
    check_place(uri, place, is_named=is_named)
    return ExportTarget(client, run, uri)


def log_export(opened: ExportTarget, folder: Path, wanted: Registration, *, step: int) -> str:
    """Log an export as a model of the run, and register it; return its address, as "models:/demo@champion".

    Args:
        folder: the export.
        step: of its checkpoint.

    Raises:
        UnusableError: the store refuses it.
        UnfitError: the store does not answer, or a file cannot be written. A model without all files is deleted.
    """
    client, run, uri = opened
    with _explain_errors(uri, f"does not have all of {folder}, which is whole: remove it, and repeat the command"):
        model_id = _log(client, run, folder, step=step)
        return f"models:/{model_id}" if wanted.name is None else _register(client, run, model_id, wanted)


def _log(client: MlflowClient, run: Run, folder: Path, *, step: int) -> str:
    """Store the files of an export as a model of the run and return the model's id."""
    from mlflow.entities import LoggedModelOutput

    run_id, name = run.info.run_id, re.sub(r"[/:.%\"']", "_", folder.absolute().name)  # MLflow takes no other names
    model_id = client.create_logged_model(run.info.experiment_id, name=name, source_run_id=run_id).model_id
    try:
        with TemporaryDirectory() as scratch:
            _write_model(Path(scratch) / "model", folder, run_id=run_id, model_id=model_id)
            client.log_model_artifacts(model_id, str(Path(scratch) / "model"))
        client.set_logged_model_tags(model_id, {STEP_TAG: str(step)})
        client.finalize_logged_model(model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])
    except BaseException:
        with suppress(Exception):  # the first error counts; the store may be gone
            client.delete_logged_model(model_id)
        raise
    return model_id


def _write_model(path: Path, export: Path, *, run_id: str, model_id: str) -> None:
    """Write the folder of a model as MLflow has it: a description, and the export in data/."""
    with warnings.catch_warnings():
        # MLflow warns of its own type hints, and of a missing example of the input, which the signature describes.
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc
        from mlflow.models import Model

        mlflow.pyfunc.save_model(
            path,
            loader_module=_LOADER,
            data_path=str(export.absolute()),
            mlflow_model=Model(run_id=run_id, model_id=model_id),
            signature=_signature(),
            pip_requirements=[f"dist-mem[mlflow]=={__version__}"],
        )


def _signature() -> Any:
    """Return what the served model takes and returns; `dist_mem/api/serving.py` reads and writes it."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    results = (
        *(("string", "continuation"), ("long", "num_tokens")),  # of generate; of score
        *(("double", "nats_per_token"), ("double", "perplexity")),
    )
    params = (
        *(("mode", "string", "generate"), ("num_tokens", "long", 256), ("temperature", "double", 1.0)),
        *(("top_p", "double", 0.95), ("seed", "long", 0)),
    )
    return ModelSignature(
        inputs=Schema([ColSpec("string", "prompt")]),
        outputs=Schema([ColSpec(kind, name, required=False) for kind, name in results]),
        params=ParamSchema([ParamSpec(*param) for param in params]),
    )


def _register(client: MlflowClient, run: Run, model_id: str, wanted: Registration) -> str:
    """Register a logged model as a new version and return the address of it."""
    assert wanted.name is not None
    if not _is_registered(client, wanted.name):
        client.create_registered_model(wanted.name)
    # Not models:/ID, which MLflow's SQL stores look up in the store of the process.
    place = client.get_logged_model(model_id).artifact_location
    version = client.create_model_version(wanted.name, place, run.info.run_id, model_id=model_id).version
    if wanted.alias is None:
        return f"models:/{wanted.name}/{version}"
    client.set_registered_model_alias(wanted.name, wanted.alias, version)
    return f"models:/{wanted.name}@{wanted.alias}"


def _is_registered(client: MlflowClient, name: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.get_http_status_code() == 404:
            return False
        raise
    return True


@contextmanager
def _explain_errors(uri: str, what: str) -> Iterator[None]:
    """Raise errors of MLflow's client in one line: UnusableError if it refuses, UnfitError otherwise."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # any of the many libraries under MLflow's stores
        kind = _kind_of(error)
        raise kind(f"--mlflow: MLflow at {without_credentials(uri)} {what}: {first_line(error)}") from error


def _kind_of(error: Exception) -> type[RunError]:
    """Return UnusableError if MLflow refuses what the user asks for; another start may have more luck otherwise."""
    return UnusableError if remedy_for(error) or is_refusal(error) else UnfitError


def invalid_request(error: Exception) -> Exception:
    """Return the error with which an MLflow server answers a request that the model refuses: status 400."""
    from mlflow.exceptions import MlflowException

    return MlflowException.invalid_parameter_value(str(error))


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
        UnusableError: MLflow is not installed or does not have it, or the folder contains no export, or several; or an
            override is invalid.
        UnfitError: MLflow cannot be reached now.
    """
    require("mlflow", address)
    import_mlflow_quietly()
    given = [text for text in overrides if isinstance(text, str) and text.startswith("tracking")]
    store = store_uri(load_block(TrackingConfig, "tracking", given))
    folder = Path(mkdtemp(prefix="dist_mem-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        _fetch(address, store, folder)
    except RunError:
        raise
    except Exception as error:  # any of the many libraries under MLflow's stores
        kind = _kind_of(error)
        raise kind(
            f"MLflow cannot fetch {address}: {first_line(error)}; "
            "check the address, and give the store as tracking.uri=URL"
        ) from error
    exports = sorted(path.parent for path in folder.rglob("manifest.json"))
    if len(exports) != 1:
        some = f"has {len(exports)}: give the path of one" if exports else "has none: log the folder that export writes"
        raise UnusableError(f"{address}: an export is a folder with a manifest.json, and this address {some}")
    return exports[0]


def _fetch(address: str, store: str, folder: Path) -> None:
    """Copy the artifacts of an address into a folder."""
    from mlflow.artifacts import download_artifacts

    if is_missing_file(store):
        raise UnusableError(f"{address}: there is no store {store}; give that of the model as tracking.uri=URL")
    client = connect(store)
    if registered := _REGISTERED.fullmatch(address):
        # MLflow's own function would look a registered model up in the registry of the process, not in this store.
        name = registered["name"]
        version = registered["version"] or client.get_model_version_by_alias(name, registered["alias"]).version
        address = client.get_model_version_download_uri(name, version)
    download_artifacts(artifact_uri=address, dst_path=str(folder), tracking_uri=store)

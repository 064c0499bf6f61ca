"""The MLflow run of a run directory: find or create it, and send it the entries of a log, as its pages show them.

Only rank 0 uses it. Every method may be called again after an error, with the same result as a single call: SQL stores
identify a point by name, step, time and value, and everything else is set, not added.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_mem.config import TrackingConfig
from dist_mem.runtime.figures import finite_or_nan, json_text
from dist_mem.runtime.files import is_file, write_text
from dist_mem.runtime.names import is_plain_path
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, LogError, read_header
from dist_mem.tracking.mlflow.checkpoint_model import log_checkpoint
from dist_mem.tracking.mlflow.client import (
    connect,
    experiment_id_of,
    find_run,
    first_line,
    import_mlflow_quietly,
    is_refusal,
)
from dist_mem.tracking.mlflow.store import (
    RUN_ID_FILE,
    UID_TAG,
    check_owner,
    check_place,
    experiment_of,
    is_server,
    read_run_id,
    requested_run_id,
    store_uri,
)
from dist_mem.tracking.names import in_group, valid_name, valid_text

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

_REFUSED_TAG = "dist_mem.refused"  # when MLflow last refused an entry
BRANCH_TAG = "dist_mem.branch_"  # + number; branch 1 is the run as it began
_NUMBER_TAG, _PARENT_TAG = "dist_mem.branch", "mlflow.parentRunId"  # of a nested run
_METRICS_PER_REQUEST = 900  # MLflow takes 1000 metrics, parameters and tags together
_PARAMS_PER_REQUEST = 100
_PARAM_CHARS = 500  # mlflow 3 takes 6000, the servers of earlier versions 500; the whole configuration is an artifact
_TAG_CHARS = 5000  # mlflow 3 takes 8000, the servers of earlier versions 5000
# A job that ended before MLflow answered leaves a thread that still waits; the next job in this process waits for it.
_OPENING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by uid of the log
_NOTE_TAG = "mlflow.note.content"  # the description, in Markdown
_PICTURES = (".png", ".svg", ".pdf")
_EVALUATIONS = "evaluations"
_OWN_SERVER = "http://127.0.0.1:5000"  # of `mlflow ui`


class Target(NamedTuple):
    """The MLflow run of a run directory."""

    uri: str
    run_dir: Path
    header: Header  # of its log
    is_named: bool = True  # False: the store is the default, in the working directory, which may come from anybody


def target_of(tracking: TrackingConfig, run_dir: Path, header: Header, *, is_named: bool = True) -> Target:
    """Return the run of a log."""
    return Target(store_uri(tracking), run_dir, header._replace(experiment=experiment_of(tracking, header)), is_named)


def file_inside(run_dir: Path, name: str) -> Path:
    """Return the file `name` of a run directory. Raises LogError if it is no file, or outside by .. or a link."""
    path = run_dir / name
    if not (is_file(path) and path.resolve().is_relative_to(run_dir.resolve())):
        raise LogError(f"{name!a} is no file inside the run directory")
    return path


class MlflowRun:
    """The MLflow run of a log. `run_id` is None until MLflow has answered; other members need `open` first."""

    def __init__(self, target: Target, *, report: Callable[[str], None]) -> None:
        """Import mlflow; send nothing yet. `report` is called with a line for the user."""
        import_mlflow_quietly()  # not in a thread: imports of two threads can deadlock
        self.run_id: str | None = None
        self.where = ""  # how to open its page
        self.tags: Mapping[str, str] = {}  # of the run, when it was opened
        self._target = target
        self._report = report
        self._client: Any = None
        self._run: Any = None
        self._params: dict[str, str] = {}
        self.refused: dict[str, str] = {}  # names that MLflow has refused for good -> what was reported

    def open(self, start_time: int | None) -> None:
        """Find the run by its id, else by its log's uid, else create it with `start_time` (ms; None: now).

        Raises:
            ForeignError: the run of this id has another log; nothing is changed.
            UnusableError: the experiment is deleted or absent, or the files of the run go elsewhere.
        """
        with _OPENING[self._target.header.uid]:
            run = self._find_or_create(start_time)
        check_place(self._target.uri, run.info.artifact_uri, is_named=self._target.is_named)
        self._run = run
        self.where = address_of(self._target.uri, run.info.experiment_id, run.info.run_id)
        self.run_id, self.tags, self._params = run.info.run_id, run.data.tags, dict(run.data.params)
        self._report(f"MLflow run {run.info.run_name} ({self.run_id}) at {self._target.uri}")

    def _find_or_create(self, start_time: int | None) -> Run:
        uri, run_dir, header, _ = self._target
        known = read_run_id(run_dir)
        self._client = self._client or connect(uri)
        run = find_run(self._client, known) if known else None
        if run is not None and UID_TAG not in run.data.tags and run.info.run_id == requested_run_id():
            self._client.set_tag(run.info.run_id, UID_TAG, header.uid)
            run = self._client.get_run(run.info.run_id)  # another job may have set its own
        if run is None:
            assert header.experiment is not None, "target_of has set it"
            experiment_id = experiment_id_of(self._client, header.experiment)
            lost = f"tags.`{UID_TAG}` = '{header.uid}'"  # created by a request whose response was lost
            run = next(iter(self._client.search_runs([experiment_id], lost, max_results=1)), None)
        if run is None:
            if known:
                self._report(f"MLflow at {uri} has no run {known}: creating a new one, with everything from the start")
            run = self._client.create_run(
                experiment_id, start_time=start_time, tags={UID_TAG: header.uid}, run_name=header.run_name
            )
        check_owner(run.info.run_id, run.data.tags, header.uid, run_dir)
        if run.info.run_id != known:
            write_text(run_dir / RUN_ID_FILE, run.info.run_id + "\n")
        return run

    def takes_entries(self) -> bool:
        """Whether MLflow still has the run. Raises its error if it cannot write now, so that no refusal says anything.

        MLflow answers with the status of a bad value (400) if its database is read-only, as after a failover.
        """
        if self.run_id is None or find_run(self._client, self.run_id) is None:
            return False
        self._client.set_tag(self.run_id, _REFUSED_TAG, datetime.now(UTC).isoformat())  # an equal value is not written
        return True

    def history(self, name: str, run_id: str | None = None) -> Sequence[Metric]:
        """Return the values of a metric; `run_id`: of a nested run."""
        found: Sequence[Metric] = self._client.get_metric_history(run_id or self.run_id, valid_name(name))
        return found

    def nest(self, number: int, *, first: int, last: int, before: int) -> str:
        """Return the id of the run inside this one with the points that replace those of some steps; it may be new.

        Args:
            number: of the branch; that of the run as it began is 1.
            first, last: these steps were made again.
            before: time in milliseconds; the points of this run from before are those that count no more.
        """
        info = self._run.info
        wanted = f"tags.`{_PARENT_TAG}` = '{self.run_id}' AND tags.`{_NUMBER_TAG}` = '{number}'"
        with _OPENING[self._target.header.uid]:
            run = next(iter(self._client.search_runs([info.experiment_id], wanted, max_results=1)), None)
            if run is None:
                name = f"{info.run_name}: steps {first} to {last} again"
                tags = {_PARENT_TAG: str(self.run_id), _NUMBER_TAG: str(number)}
                tags[_NOTE_TAG] = describe_repeat(info.run_name, first, last)
                run = self._client.create_run(info.experiment_id, start_time=before, run_name=name, tags=tags)
                self._client.set_terminated(run.info.run_id, "FINISHED")
        made = datetime.fromtimestamp(before / 1000, UTC).isoformat(timespec="seconds")
        says = f"steps {first} to {last} logged before {made} count no more; those that do are in the nested run"
        if f"{BRANCH_TAG}{number}" not in self.tags:
            self._report(f"MLflow cannot delete points: {says} {run.info.run_name!r}")
        self.send_tags({f"{BRANCH_TAG}{number}": f"{says} {run.info.run_id}"})
        return str(run.info.run_id)

    def _log(self, kind: str, items: Sequence[Any], run_id: str | None = None) -> None:
        """Log metrics, params or tags in one request; if MLflow refuses it for good, each that it refuses is named."""
        try:
            self._client.log_batch(run_id or self.run_id, **{kind: items})
        except Exception as error:
            if not (is_refusal(error) and self.takes_entries()):
                raise
            if len(items) > 1:
                middle = len(items) // 2
                self._log(kind, items[:middle], run_id)
                self._log(kind, items[middle:], run_id)
            elif items and (name := items[0].key) not in self.refused:
                self.refused[name] = f"MLflow refused {kind.removesuffix('s')} {name!a}: {first_line(error)}"
                self._report(self.refused[name])

    def send_points(self, entries: Sequence[Entry], run_id: str) -> None:
        """Send points of any number of steps to this run or a nested one."""
        from mlflow.entities import Metric

        metrics = [
            Metric(valid_name(in_group(name)), finite_or_nan(value), entry.time, entry.body["step"])
            for entry in entries
            for name, value in entry.body["metrics"].items()
        ]
        self._send_metrics(metrics, run_id)

    def send_values(self, values: Mapping[str, float], time: int) -> None:
        """Send values of one time, in milliseconds, under their own names."""
        from mlflow.entities import Metric

        self._send_metrics([Metric(valid_name(name), value, time, 0) for name, value in values.items()], self.run_id)

    def _send_metrics(self, metrics: Sequence[Any], run_id: str | None) -> None:
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            self._log("metrics", metrics[start : start + _METRICS_PER_REQUEST], run_id)

    def send_files(self, paths: Iterable[Path]) -> None:
        """Send files of this process, which need not be in the run directory."""
        for path in paths:
            self._client.log_artifact(self.run_id, str(path))

    def adopt(self, run_dirs: Iterable[Path]) -> None:
        """Nest the runs of other run directories in this one; those that are already nested stay as they are."""
        for run_dir in run_dirs:
            run_id, log = read_run_id(run_dir), run_dir / METRICS_FILE
            run = find_run(self._client, run_id) if run_id and log.exists() else None
            if run is None or run.data.tags.get(_PARENT_TAG) == self.run_id:
                continue
            if run.data.tags.get(UID_TAG) == read_header(log).uid:
                self._client.set_tag(run_id, _PARENT_TAG, self.run_id)

    def send_checkpoint(self, entry: Entry, points: Sequence[Entry], run_id: str) -> None:
        """Send a checkpoint of this run or of a nested one, as a model with the metrics of its step."""
        run = self._run if run_id == self.run_id else self._client.get_run(run_id)
        log_checkpoint(
            self._client,
            run,
            step=entry.body["step"],
            path=entry.body.get("path"),
            points=points,
            log=lambda metrics: self._log("metrics", metrics, run_id),
        )

    def send_tags(self, tags: Mapping[str, str]) -> None:
        """Send tags, at most 100."""
        from mlflow.entities import RunTag

        self._log("tags", [RunTag(valid_name(name), valid_text(value)[:_TAG_CHARS]) for name, value in tags.items()])

    def send(self, entry: Entry) -> None:
        """Send an entry of any other kind."""
        body = entry.body
        match entry.kind:
            case "params":
                self._send_params(body["params"], step=body["step"], changes=body["changes"])
            case "tags":
                self.send_tags(body)
            case "datasets":
                self._send_datasets(body["datasets"])
            case "artifact":
                path = file_inside(self._target.run_dir, body["path"])
                self._client.log_artifact(self.run_id, str(path), folder_of(body["path"]))
            case "text":
                if not is_plain_path(body["name"]):
                    raise LogError(f"{body['name']!a} is no plain name for a text")
                self._client.log_text(self.run_id, body["text"], body["name"])
            case "status" if body["status"] == "RUNNING":
                self._client.update_run(self.run_id, status="RUNNING")
            case "status":
                self._client.set_terminated(self.run_id, body["status"], entry.time)
            case _:
                raise LogError(f"this is no entry that can be read: {entry}")

    def _send_params(self, params: Mapping[str, str], *, step: int, changes: str) -> None:
        """Send new parameters; describe changed ones, which MLflow refuses, in a tag with the step.

        Args:
            changes: what has changed; "": nothing.
        """
        self._add_params({valid_name(name): valid_text(value)[:_PARAM_CHARS] for name, value in params.items()})
        if changes:
            self.send_tags({f"dist_mem.changed_params.step_{step}": changes})

    def _add_params(self, params: Mapping[str, str]) -> None:
        """Send the parameters that the run lacks; another job of the run may be sending them too."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        while absent := [name for name in params if name not in self._params][:_PARAMS_PER_REQUEST]:
            try:
                self._client.log_batch(self.run_id, params=[Param(name, params[name]) for name in absent])
            except MlflowException:  # MLflow refuses the whole batch for one parameter with another value
                present = self._client.get_run(self.run_id).data.params
                if not any(name in present for name in absent):
                    self._log("params", [Param(name, params[name]) for name in absent])
                    present = {name: params[name] for name in absent}
                self._params |= present
            else:
                self._params |= {name: params[name] for name in absent}

    def _send_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    dataset["name"],
                    dataset["digest"],
                    source_type="local",
                    source=json_text({"uri": dataset["source"]}),
                    profile=json_text(dataset["profile"]),
                ),
                [InputTag("mlflow.data.context", dataset["context"])],
            )
            for dataset in datasets
        ]
        self._client.log_inputs(self.run_id, datasets=inputs)


def folder_of(path: str) -> str | None:
    """Return the folder in MLflow of a file of the run directory: plots, evaluations, or None for the top."""
    file = PurePosixPath(path)
    if file.suffix in _PICTURES:
        return "plots"
    return _EVALUATIONS if file.parts[0] == _EVALUATIONS else None


def describe_repeat(run_name: str, first: int, last: int) -> str:
    """Return the description of a nested run."""
    return (
        f"Steps {first} to {last} of {run_name}, as they were made again after a rollback, with other values. "
        "MLflow cannot delete the earlier ones, which stay in that run; everything else is there too."
    )


def address_of(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page, with the command that serves it if there is no server."""
    server, command = uri.rstrip("/"), ""
    if not is_server(uri):
        server, command = _OWN_SERVER, f"mlflow ui --backend-store-uri {uri}, then "
    return f"{command}{server}/#/experiments/{experiment_id}/runs/{run_id}"

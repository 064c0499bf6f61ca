"""Start the tracking of a run: its log, and the readers of the log, such as a progress bar and MLflow.

Only rank 0 tracks.

    tracker = start_tracking(config, run_dir=run_dir, total_steps=1000, first_step=0)
    tracker.log(10, {"loss": 5.1})            # writes a line: tens of microseconds
    tracker.close("FINISHED")                 # takes at most FLUSH_SECONDS of mlflow/sender.py; see CLOSE_SECONDS

MLflow may be slow, down or faulty: one thread sends the log, and training neither waits nor stops. Entries that are not
sent when the job ends are sent by its next start, by `dist-mem track sync`, or by an evaluation. For some stores, see
mlflow/store.py, nothing is sent before that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dist_mem.config import Config, TrackingConfig
from dist_mem.config.check import flatten
from dist_mem.config.settings import differing_keys
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import make_folder
from dist_mem.supervision.lease import refuse_if_taken_over_throttled
from dist_mem.tracking.log import METRICS_FILE, Header, Log, find_entries, new_uid, write_log
from dist_mem.tracking.mlflow.sender import MlflowReader
from dist_mem.tracking.mlflow.store import check_store, choose_sending, experiment_of, settle_run_id, store_uri
from dist_mem.tracking.mlflow.system_metrics import record_system_metrics
from dist_mem.tracking.own_sinks import OwnSink, load_sink
from dist_mem.tracking.progress import progress_sink
from dist_mem.tracking.provenance import start_in_words
from dist_mem.tracking.readers import TENSORBOARD, TensorBoardFiles, WandbRun
from dist_mem.tracking.tracker import LogSink, Sink, Tracker

_NOTHING = ("None", "[]", "{}")  # texts of values that equal a missing key


def check_sinks(tracking: TrackingConfig, *, is_here: bool = True) -> None:
    """Check that every reader of a run can be opened, before anything is created.

    Args:
        is_here: this machine has the files and packages of the one that trains; else only addresses are checked.

    Raises:
        UnusableError: a package is missing, one of `tracking.sinks` cannot be loaded, or MLflow has no such store.
    """
    if tracking.mlflow:
        check_store(store_uri(tracking), is_here=is_here)
    if not is_here:
        return
    for named in tracking.sinks:
        load_sink(named)
    for name in ("mlflow", "tensorboard", "wandb"):
        if getattr(tracking, name):
            require(name, f"tracking.{name}=true", f"set tracking.{name}=false")


def start_tracking(
    config: Config,
    *,
    run_dir: Path,
    total_steps: int,
    first_step: int,
    num_points: int | None = None,
    measurements: Collection[str] = (),
) -> Tracker:
    """Return the tracker of rank 0; other ranks use `Tracker()`. `check_run_files` has checked an existing log.

    Args:
        first_step: the step training continues from, 0 for a fresh start; recorded points past it are superseded.
        num_points: points logged up to `first_step`, by the checkpoint's count; None: it has none.
        measurements: names of metrics that an exact resume does not repeat, such as times.
    """
    make_folder(run_dir)
    sinks: list[Sink] = []
    with ExitStack() as on_failure:  # a start that fails leaves no file open

        def add(sink: Sink) -> None:
            sinks.append(sink)
            on_failure.callback(sink.close, "FAILED")

        progress = progress_sink(total_steps=total_steps, first_step=first_step, every=config.tracking.every)
        on_failure.callback(progress.close, "FAILED")
        report = progress.message
        if config.tracking.mlflow:
            settle_run_id(run_dir, report=report)
        log = _open_log(config.tracking, config.name, run_dir)
        on_failure.callback(log.close)
        add(LogSink(log, first_step=first_step, report=report, num_points=num_points, measurements=measurements))
        _record_start(config.document, log, first_step)
        if config.tracking.mlflow and config.tracking.system_metrics:
            add(record_system_metrics(log, report=report))
            sinks.reverse()  # it ends before the log
        if config.tracking.tensorboard:
            add(TensorBoardFiles(run_dir / TENSORBOARD, log, first_step=first_step))
        if config.tracking.mlflow:
            sending = choose_sending(config.tracking)
            report(sending.message)
            add(MlflowReader(config.tracking, run_dir, log, sends=sending.is_on, report=report))
        if config.tracking.wandb:  # this and own sinks come after those that close at once
            project, name = config.tracking.experiment, config.tracking.run_name or config.name
            of_run = {"project": project, "name": name, "config": config.document}
            add(WandbRun(of_run, run_dir, log, first_step=first_step, report=report))
        for named in config.tracking.sinks:
            add(OwnSink(named, run_dir, first_step=first_step, report=report))
        sinks.append(progress)  # last: others report through it until they are closed
        on_failure.pop_all()
    return Tracker(sinks)


def _open_log(tracking: TrackingConfig, name: str, run_dir: Path) -> Log:
    path = run_dir / METRICS_FILE
    if not path.exists():
        experiment = experiment_of(tracking) if tracking.mlflow else None
        write_log(path, Header(new_uid(), tracking.run_name or name, experiment))
    return Log(path, partial(refuse_if_taken_over_throttled, run_dir))


def _record_start(document: Mapping[str, Any], log: Log, first_step: int) -> None:
    """Record what is special about this start: what it changes, and where it runs."""
    num_starts = sum(entry.body["status"] == "RUNNING" for entry in find_entries(log.path, "status"))
    log.record("params", parameters_entry(document, log.path, step=first_step))
    log.record("tags", {f"dist_mem.start_{num_starts:03}": start_in_words(first_step)})


def as_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of a tree as texts; names of nested blocks are joined by dots."""
    return {name.replace("[", ".").replace("]", ""): str(value) for name, value in flatten(tree).items()}


def _is_of_user(name: str, before: Mapping[str, str], now: Mapping[str, str], defaults: Mapping[str, str]) -> bool:
    """Return whether a key that an earlier configuration lacks is no newer one, at its default."""
    kind = f"{name.rpartition('.')[0]}.kind"  # the defaults have options of the memory `none` alone
    is_of_memory = name.startswith("memory.") and before.get(kind) == now.get(kind)
    return not is_of_memory and now[name] != defaults.get(name)


def parameters_entry(document: Mapping[str, Any], log: Path, *, step: int) -> dict[str, Any]:
    """Return the body of the log's entry of the configuration, `Config.document`, for a start from `step`.

    It has under `params` the keys whose values differ from the defaults, and the kind of the memory, which the MLflow
    run gets at its first start; under `changes` what another start changes, after what earlier starts from this step
    changed; and under `config` the whole configuration, unresolved: a value from the environment may be a secret.
    """
    now, defaults = map(as_texts, (document, Config().document))
    entries = [entry.body for entry in find_entries(log, "params") if "config" in entry.body]
    if not entries:
        chosen = {"memory.kind", *differing_keys(defaults, now)}
        params = {name: value for name, value in now.items() if name in chosen}
        return {"params": params, "changes": "", "config": now, "step": step}
    earlier = [body["changes"] for body in entries if body["step"] == step][-1:]  # of a start from the same step
    before = entries[-1]["config"]
    was, is_now = ({name: text for name, text in each.items() if text not in _NOTHING} for each in (before, now))
    differing = differing_keys(was, is_now)
    changed = [name for name in differing if name in before or _is_of_user(name, before, now, defaults)]
    changes = [f"{name}: {before.get(name)} -> {now.get(name)}" for name in changed]
    return {"params": {}, "changes": "; ".join(filter(None, [*earlier, *changes])), "config": now, "step": step}

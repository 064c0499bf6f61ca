"""`dist-mem track sync RUN`: send the entries of runs' journals that MLflow lacks.

    dist-mem track sync runs/demo runs/none tracking.uri=http://mlflow.example:5000
    dist-mem track sync runs/demo configs/demo.yaml             # with the `tracking:` block of a user's file

Use it for runs that ended while MLflow was down, and on the login node of clusters whose compute nodes have no network:
also while the job runs, and any number of times. A run whose job was killed outright and not started again becomes
KILLED instead of RUNNING.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dist_mem.config import TrackingConfig, merge_checked
from dist_mem.config.check import flatten, stop_on
from dist_mem.config.credentials import check_credentials
from dist_mem.config.sources import COMMAND_LINE, plain_block, read_overrides, read_sources
from dist_mem.config.text_checks import check_texts
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UnusableError
from dist_mem.runtime.lease import STALE_SECONDS
from dist_mem.tracking.completeness import find_gaps, newest_count
from dist_mem.tracking.refusals import brief
from dist_mem.tracking.start import JOURNAL, send_journals
from dist_mem.tracking.stores import check_scheme, is_named_by_user


def run(run_dirs: Sequence[Path], overrides: Sequence[str] = (), files: Sequence[str] = ()) -> int:
    """Run the command; return the exit code of the process, 0 if MLflow has everything of every run.

    Args:
        overrides: `key=value`, for keys of `tracking`.
        files: YAML files of the user, of which the `tracking:` block is used.

    Raises:
        UnusableError: an override is invalid, or a directory is not that of a run.
    """
    if not run_dirs:
        raise UnusableError("give the directories of one or more runs")
    given = OmegaConf.merge(*[_tracking_of(file) for file in files], OmegaConf.create(read_overrides(overrides)))
    configs = [_read_config(run_dir, given) for run_dir in run_dirs]
    named = [f"tracking.uri={uri}"] if (uri := OmegaConf.select(given, "tracking.uri")) else []
    return max(_sync(config, run_dir, named) for config, run_dir in zip(configs, run_dirs, strict=True))


def _tracking_of(file: str) -> Any:
    """Return the `tracking:` block of a configuration. Raises ConfigError."""
    (source, _) = read_sources([file])
    return OmegaConf.create({"tracking": source.tree.get("tracking") or {}})


def _read_config(run_dir: Path, given: Any) -> Any:
    """Read the configuration of a run and check its `tracking`; the rest may need another environment."""
    unresolved: Any = OmegaConf.to_container(given)
    stop_on([problem._replace(where=COMMAND_LINE) for problem in check_credentials(unresolved)])
    checked = merge_checked(TrackingConfig, given.get("tracking", {}), "tracking")
    stop_on(
        [problem._replace(where=COMMAND_LINE) for problem in check_texts(flatten(plain_block(checked), "tracking"))]
    )
    if checked.uri is not None:
        check_scheme(checked.uri)
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UnusableError(f"{path} is missing; give the directory of a run")
    return OmegaConf.merge(OmegaConf.load(path), given)


def _sync(config: Any, run_dir: Path, named: Sequence[str]) -> int:
    def report(text: str) -> None:
        print(f"{run_dir}: {text}")

    try:
        is_named = is_named_by_user(config, named)
        counted = newest_count(run_dir)
        sender = send_journals(
            config, run_dir, report=report, is_dead=lambda: _is_dead(run_dir, report), is_named=is_named
        )
        gaps = find_gaps(run_dir, counted, run_dir / JOURNAL, sender)
    except UnusableError as error:
        print(f"error: {run_dir}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(f"error: {run_dir}: MLflow does not have everything: {brief(error)}", file=sys.stderr)
        return EXIT_FAILED
    for gap in gaps:
        print(f"error: {run_dir}: {gap}", file=sys.stderr)
    if gaps:
        report(f"{sender.num_sent} entries sent; MLflow has all that is left, but points are missing")
        return EXIT_FAILED
    report(
        f"{sender.num_sent} entries sent; MLflow has everything" if sender.num_sent else "MLflow has everything already"
    )
    return EXIT_DONE


def _is_dead(run_dir: Path, report: Callable[[str], None]) -> bool:
    """Whether no job holds the run directory: its lease is gone, or shows no sign of life for STALE_SECONDS."""
    lease = run_dir / "lease.json"
    deadline = time.monotonic() + STALE_SECONDS
    try:
        first = _last_touch(lease)
        report(f"its job has not reported its end: waiting up to {STALE_SECONDS:.0f} s for a sign of life")
        while time.monotonic() < deadline:
            if _last_touch(lease) != first:
                return False
            time.sleep(0.2)
    except FileNotFoundError:
        return True
    return True


def _last_touch(path: Path) -> int:
    with path.open("rb") as file:  # opened each time: otherwise NFS answers from its cache
        return os.fstat(file.fileno()).st_mtime_ns

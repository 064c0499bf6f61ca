"""`dist-mem track sync RUN`: send what the journals of runs hold and MLflow lacks.

    dist-mem track sync runs/demo runs/none tracking.uri=http://mlflow.example:5000
    dist-mem track sync runs/demo configs/demo.yaml             # with the `tracking:` block of a file of the user's

For runs that ended while MLflow was down, and for clusters whose compute nodes reach no network: the same command on a
login node, also while the job runs, as often as you like. A run whose job was killed outright, and has not been started
again, is RUNNING no more then, but KILLED.
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
    """The command. Returns the exit code of the process: 0 when MLflow has everything of every run.

    Args:
        overrides: `key=value`, of the keys of tracking.  files: YAML files of the user, whose `tracking:` block counts.

    Raises:
        UnusableError: an override, or a directory that is no run's.
    """
    if not run_dirs:
        raise UnusableError("give the directories of one or more runs")
    given = OmegaConf.merge(*[_tracking_of(file) for file in files], OmegaConf.create(read_overrides(overrides)))
    configs = [_read_config(run_dir, given) for run_dir in run_dirs]
    named = [f"tracking.uri={uri}"] if (uri := OmegaConf.select(given, "tracking.uri")) else []
    return max(_sync(config, run_dir, named) for config, run_dir in zip(configs, run_dirs, strict=True))


def _tracking_of(file: str) -> Any:
    """The `tracking:` block of a configuration. Raises ConfigError."""
    (source, _) = read_sources([file])
    return OmegaConf.create({"tracking": source.tree.get("tracking") or {}})


def _read_config(run_dir: Path, given: Any) -> Any:
    """The configuration of a run as far as tracking goes; the rest may need an environment that is not here."""
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
    def say(text: str) -> None:
        print(f"{run_dir}: {text}")

    try:
        is_named = is_named_by_user(config, named)
        counted = newest_count(run_dir)
        sender = send_journals(config, run_dir, report=say, is_dead=lambda: _is_dead(run_dir, say), is_named=is_named)
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
        say(f"{sender.num_sent} entries sent; MLflow has all that is left, which is not everything")
        return EXIT_FAILED
    say(
        f"{sender.num_sent} entries sent; MLflow has everything" if sender.num_sent else "MLflow has everything already"
    )
    return EXIT_DONE


def _is_dead(run_dir: Path, say: Callable[[str], None]) -> bool:
    """Whether nobody holds the run directory any more: its lease is gone, or has no sign of life for a while."""
    lease = run_dir / "lease.json"
    deadline = time.monotonic() + STALE_SECONDS
    try:
        first = _last_touch(lease)
        say(f"its job has not told its end: waiting up to {STALE_SECONDS:.0f} s for a sign of life")
        while time.monotonic() < deadline:
            if _last_touch(lease) != first:
                return False
            time.sleep(0.2)
    except FileNotFoundError:
        return True
    return True


def _last_touch(path: Path) -> int:
    with path.open("rb") as file:  # opened anew each time, or NFS answers from its cache
        return os.fstat(file.fileno()).st_mtime_ns

"""`dist-mem track sync RUN`: send what the journals of runs hold and MLflow lacks.

    dist-mem track sync runs/demo runs/none tracking.uri=http://mlflow.example:5000

For runs that ended while MLflow was down, and for clusters whose compute nodes reach no network: the same command on a
login node, also while the job runs, as often as you like.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dist_mem.config import TrackingConfig, merge_checked
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.tracking.delivery import brief
from dist_mem.tracking.start import send_journals


def run(run_dirs: Sequence[Path], overrides: Sequence[str] = ()) -> int:
    """The command. Returns the exit code of the process: 0 when MLflow has everything of every run.

    Raises:
        UnusableError: an override, or a directory that is no run's.
    """
    if not run_dirs:
        raise UnusableError("give the directories of one or more runs")
    configs = [_read_config(run_dir, overrides) for run_dir in run_dirs]
    return max(_sync(config, run_dir) for config, run_dir in zip(configs, run_dirs, strict=True))


def _read_config(run_dir: Path, overrides: Sequence[str]) -> Any:
    """The configuration of a run as far as tracking goes; the rest may need an environment that is not here."""
    given = OmegaConf.from_dotlist(list(overrides))
    merge_checked(TrackingConfig, given.get("tracking", {}), "tracking")
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UnusableError(f"{path} is missing; give the directory of a run")
    return OmegaConf.merge(OmegaConf.load(path), given)


def _sync(config: Any, run_dir: Path) -> int:
    def say(text: str) -> None:
        print(f"{run_dir}: {text}")

    try:
        num_sent = send_journals(config, run_dir, report=say)
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(f"error: {run_dir}: MLflow does not have everything: {brief(error)}", file=sys.stderr)
        return EXIT_FAILED
    say(f"{num_sent} entries sent; MLflow has everything" if num_sent else "MLflow has everything already")
    return EXIT_DONE

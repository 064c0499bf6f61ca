"""What a run was, for a command that reads it and changes nothing: the configuration of a part, the recorded losses.

A recorded point is the mean of the steps since the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dist_mem.checkpoint.manifest import read_manifest
from dist_mem.config import Config, ConfigError, change_config, load_config
from dist_mem.config.check import Problem, stop_on
from dist_mem.config.keys import RECOMPUTATION
from dist_mem.config.resume_rules import changed_keys
from dist_mem.config.settings import keys_set_by, may_set
from dist_mem.data.curriculum import with_ends
from dist_mem.data.remote.fetch import is_remote
from dist_mem.memory import memory_options
from dist_mem.memory.outside import kept_kinds
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.training.history import HISTORY, RunPart, read_history

# Neither evaluation nor tracking changes an update: where a stage ended is known. Hooks that measure slow ranks are not
# needed.
_WITHOUT = (
    *("eval.every=null", "checkpoint.keep_best=null", "data.until_accuracy=null"),
    *("tracking.mlflow=false", "watchdog.straggler=null"),
)


def read_part(run_dir: Path, part: RunPart, overrides: Sequence[str]) -> Config:
    """Return the configuration of a part, without the options of its memory; no code of a memory runs.

    The steps at which stages of its curriculum had ended are in it.

    Raises:
        ConfigError: an override of another key, or data at a server or from a command that only the run names.
    """
    _check_keys(overrides)
    config = _load(run_dir, part, overrides)
    if is_remote(config.data.path) and not any(text.startswith("data.path=") for text in overrides):
        where = f"servers and commands that only {run_dir / HISTORY} names are not used"
        raise ConfigError([Problem("data.path", f"give data.path=FOLDER or its URL: {where}")])
    return change_config(config, {"run_dir": str(run_dir)})


def read_part_with_memory(run_dir: Path, part: RunPart, overrides: Sequence[str], *, checkpoint: Path | None) -> Config:
    """Return the configuration of a part with the options of its memory, to build its model.

    Args:
        checkpoint: has the programs of memories as trained; None: they are read where the run read them.

    Raises:
        ConfigError: as `read_part`; a memory is a program, without eval.allow_code; or a value of the environment
            has changed since the checkpoint.
    """
    given = read_part(run_dir, part, overrides)
    kept = kept_kinds(given.memory, checkpoint or run_dir)
    if kept and not given.eval.allow_code:
        text = f"is a program, which recomputing {run_dir} would run: read it, then add eval.allow_code=true"
        raise ConfigError([Problem("memory", text)])
    config = _load(run_dir, part, [*(kept if checkpoint else ()), *overrides], with_memory=True)
    then = read_manifest(checkpoint).get("environment", {}) if checkpoint else {}
    stop_on(
        Problem(change.key, f"is {change.new}, which has another value than in training; set it back")
        for change in changed_keys(config, config, then)
    )
    return change_config(config, {"run_dir": str(run_dir), "train.threads": part.threads})


def _load(run_dir: Path, part: RunPart, overrides: Sequence[str], *, with_memory: bool = False) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"config-of-step-{part.step}.yaml"
        path.write_text(part.config, encoding="utf-8")
        options = memory_options if with_memory else None
        try:
            config = load_config([str(path), *_WITHOUT, *overrides], memory_options=options)
            return change_config(config, {"data.curriculum": with_ends(config.data, part.stage_ends).curriculum})
        except ConfigError as error:  # names the temporary file
            where = f"{run_dir / HISTORY}, config of step {part.step}"
            problems = [
                each._replace(where=where) if not each.where or each.where.startswith(str(path)) else each
                for each in error.problems
            ]
            raise ConfigError(problems) from None


def _check_keys(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that would change what is read or computed."""
    stop_on(
        Problem(key, f"is that of the run; this command may set {', '.join(keys_set_by(RECOMPUTATION))}")
        for key in (text.partition("=")[0] for text in overrides)
        if not may_set(RECOMPUTATION, key)
    )


class RecordedPoint(NamedTuple):
    """A recorded point of the training."""

    first: int  # its losses are means over the steps first..last
    last: int
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        means = f", mean of steps {self.first} to {self.last}" if self.first < self.last else ""
        return f"step {self.last}{means}"


def read_recorded(run_dir: Path) -> list[RecordedPoint]:
    """Return the points of the training in the order of their steps; none if nothing is recorded yet.

    Raises:
        UnusableError: metrics.jsonl or history.jsonl is damaged, or the latter is missing.
    """
    part = read_history(run_dir)[0]
    begun = part.step - part.num_metered  # not 0 with a checkpoint of another run
    points = {point.step: point for point in read_points(run_dir / METRICS_FILE) if "loss" in point.metrics}
    steps = sorted(points)
    return [
        RecordedPoint(before + 1, step, points[step].metrics)
        for before, step in zip([begun, *steps], steps, strict=False)
    ]


def point_at(recorded: list[RecordedPoint], step: int) -> RecordedPoint | None:
    """Return the point that includes a step; None if it is not recorded."""
    return next((point for point in recorded if point.first <= step <= point.last), None)

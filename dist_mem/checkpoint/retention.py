"""Say what a run keeps: which steps are never saved, and which checkpoints are kept; delete the others.

Only checkpoints up to the one just committed count, and only those with a readable manifest. Later ones are left over
from before the run was set back to an earlier step; those without a manifest are broken. Neither kind takes the place
of a good checkpoint, and both are kept for inspection, as are all directories called `.broken`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.checkpoint.manifest import list_steps, read_manifest, step_dir
from dist_mem.config import CheckpointConfig
from dist_mem.errors import CheckpointError
from dist_mem.runtime.files import fsync_path

_DELETED = ".deleted.partial"


def unsaved_steps(rules: CheckpointConfig) -> list[str]:
    """Return one line if a run saves nothing before its end."""
    if rules.every is not None or rules.every_minutes is not None:
        return []
    then = "a kill, a dead node or a lack of memory loses every step"
    return [f"only at the end and on a stop signal; {then}: set checkpoint.every or checkpoint.every_minutes"]


class Validation(NamedTuple):
    """The newest evaluation at the time of a checkpoint."""

    step: int  # of the evaluation
    loss: float  # nats per scored token
    measure: str  # settings and data that it was measured with; losses of others are not comparable


class StoredCheckpoint(NamedTuple):
    """A checkpoint with a readable manifest."""

    step: int
    validation: Validation | None


def rules_by_step(kept: Sequence[StoredCheckpoint], rules: CheckpointConfig) -> dict[int, list[str]]:
    """Return the steps, oldest first, with the rules that keep each checkpoint; the newest is always kept."""
    steps = sorted(found.step for found in kept)
    if rules.keep_last is None:
        return {step: ["all"] for step in steps}
    wanted = {"keep_last": steps[-rules.keep_last :]}
    if rules.keep_every is not None:
        wanted["keep_every"] = [step for step in steps if step % rules.keep_every == 0]
    if rules.keep_best is not None:
        wanted["keep_best"] = _best(kept, rules.keep_best)
    return {step: [rule for rule, chosen in wanted.items() if step in chosen] for step in steps}


def _best(kept: Sequence[StoredCheckpoint], most: int) -> list[int]:
    """Return the steps with the lowest validation losses of each measure, at most `most`.

    One per evaluation: that of its first checkpoint. What was best by an earlier measure stays: settings that are tried
    for a moment delete nothing.
    """
    evaluations: dict[Validation, int] = {}
    for found in sorted(kept):
        if found.validation is not None and found.validation.loss == found.validation.loss:  # not NaN
            evaluations.setdefault(found.validation, found.step)
    ranked = sorted(evaluations, key=lambda made: (made.loss, made.step))
    alike = [[made for made in ranked if made.measure == measure] for measure in {made.measure for made in ranked}]
    return [evaluations[made] for found in alike for made in found[:most]]


def prune(run_dir: Path, step: int, rules: CheckpointConfig) -> list[str]:
    """Delete superfluous checkpoints once that of `step` is committed; return one message per checkpoint.

    A checkpoint that cannot be deleted gets a message too; the next save tries again. No error of the disk is raised:
    all ranks would take the committed checkpoint for one that could not be written.
    """
    if rules.keep_last is None:
        return []
    messages = []
    folder = step_dir(run_dir, step).parent
    try:
        left = sorted(folder.glob(f".*{_DELETED}"))  # by a save that could not delete them
        reasons = rules_by_step(stored_checkpoints(run_dir, step), rules)
    except OSError as error:
        return [f"cannot look for checkpoints to delete in {folder}: {error}"]
    for directory in [*left, *(step_dir(run_dir, old) for old, kept_by in reasons.items() if not kept_by)]:
        try:
            _delete(directory)
        except OSError as error:
            messages.append(f"cannot delete {directory}: {error}")
        else:
            messages.append(f"deleted {directory}, which checkpoint.keep_* do not keep")
    return messages


def stored_checkpoints(run_dir: Path, newest: int) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run up to the step `newest` that have a readable manifest."""
    kept = []
    for step in list_steps(run_dir):
        if step > newest:
            continue
        try:
            manifest = read_manifest(step_dir(run_dir, step))
        except CheckpointError:  # already reported by the start that passed it over
            continue
        validation = manifest.get("validation")
        kept.append(StoredCheckpoint(step, None if validation is None else Validation(**validation)))
    return kept


def _delete(directory: Path) -> None:
    """Rename a checkpoint so that nobody reads half of it, then delete it; the next start cleans up after a crash."""
    if not directory.name.endswith(_DELETED):
        directory = directory.rename(directory.with_name(f".{directory.name}{_DELETED}"))
        fsync_path(directory.parent)
    shutil.rmtree(directory)

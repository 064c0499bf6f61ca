"""Find the checkpoint that a job resumes from, read its configuration, and compare it with the present one.

find_resumption   at the start of a job, on all ranks, before data or DeepSpeed are opened
check_run_dir     in one process, for `train --check` and `launch`, before a job starts
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.manifest import first_verified, verify, verify_size
from dist_mem.checkpoint.resume_choice import ResumeChoice, choose_checkpoint, find_candidates, read_or_refuse
from dist_mem.config import Config, ConfigError, DataConfig, load_config, read_config
from dist_mem.config.memory_blocks import kinds_of
from dist_mem.config.resume_rules import Change, check_changes
from dist_mem.data.curriculum import training_dirs
from dist_mem.data.shard import Index
from dist_mem.errors import CheckpointError, UnusableError
from dist_mem.memory import memory_options
from dist_mem.runtime.distributed import World, decide_on_rank0
from dist_mem.runtime.signals import STOP_FILE


class Resumption(NamedTuple):
    """A verified checkpoint that the present configuration may resume from."""

    choice: ResumeChoice
    saved: Config  # the configuration of the checkpoint
    changes: list[Change]  # of the configuration since then, in the order of the schema
    seconds: float  # spent on finding and verifying the checkpoint


def find_resumption(config: Config, world: World, allowed: Sequence[str] = ()) -> Resumption | None:
    """Choose the checkpoint that `resume` selects and compare configurations; None for a run without checkpoints.

    Every rank calls it; all get the same result except for `seconds`.

    Args:
        allowed: keys given to `--allow`.

    Raises:
        UnusableError: on every rank; no checkpoint can be used, or a key changed that must not change.
    """
    began = time.perf_counter()
    choice = choose_checkpoint(config.resume, Path(config.run_dir), world)
    if choice is None:
        return None
    saved = saved_config(choice.directory, config.memory)
    then = choice.manifest.get("environment", {})
    changes = decide_on_rank0(lambda: check_changes(saved, config, then=then, allowed=allowed))
    return Resumption(choice, saved, changes, time.perf_counter() - began)


def saved_config(directory: Path, memory: Any) -> Config:
    """Return the result of `read_saved_config`, which rank 0 calls for all. Raises UnusableError."""
    return decide_on_rank0(lambda: read_or_refuse(lambda: read_saved_config(directory, memory)))


def check_run_dir(config: Config, allowed: Sequence[str] = ()) -> tuple[Path, dict[str, Any]] | None:
    """Compare the configuration with the checkpoint that a job would resume from, without hashing its files.

    Returns:
        The checkpoint and its manifest; None: the job would begin at step 0.

    Raises:
        UnusableError: the job would be refused.
    """
    _check_place(Path(config.run_dir))
    saved: dict[Path, Config] = {}

    def check(directory: Path) -> dict[str, Any]:
        manifest = verify(directory, verify_size)
        try:
            saved[directory] = read_saved_config(directory, config.memory)
        except ConfigError as error:  # damaged: the job passes it over and reports the reason
            raise CheckpointError(f"{directory}: {error}") from error
        return manifest

    found = first_verified(
        lambda: read_or_refuse(lambda: find_candidates(config.resume, Path(config.run_dir))).candidates, check
    )
    if found is None:
        return None
    directory, manifest = found[:2]
    check_changes(saved[directory], config, then=manifest.get("environment", {}), allowed=allowed)
    return directory, manifest


def _check_place(run_dir: Path) -> None:
    """Raise UnusableError if no folder can be made there, without making it, or its file STOP prevents a start."""
    there = next((path for path in (run_dir, *run_dir.parents) if os.path.lexists(path)), None)
    if there is not None and not there.is_dir():
        raise UnusableError(f"run_dir {run_dir} cannot be used: {there} is no folder: give another one")
    if there is not None and not os.access(there, os.W_OK | os.X_OK):
        raise UnusableError(f"run_dir {run_dir} cannot be used: {there} is not writable for you: give another one")
    if (run_dir / STOP_FILE).exists():
        raise UnusableError(f"{run_dir / STOP_FILE} exists, and stops the run: remove it to continue")


def data_fingerprint(splits: Sequence[Index]) -> str:
    """Return what a checkpoint keeps of every training split: their fingerprints, one after the other."""
    return " ".join(split.fingerprint for split in splits)


def check_data(directory: Path, manifest: Mapping[str, Any], splits: Sequence[Index], data: DataConfig) -> None:
    """Raise CheckpointError if a checkpoint was trained on other splits than these; a mixture may have more sources."""
    fingerprints = manifest["data_fingerprint"].split()
    if bool(data.mixture) != bool(manifest.get("mixture")):
        other = "without data.mixture; leave it out" if data.mixture else "with data.mixture; give it again"
        raise CheckpointError(f"{directory}: was trained {other}, or start another run with name=NAME")
    if len(fingerprints) > len(splits) and data.mixture:
        count = f"has {len(fingerprints)} sources, data.mixture now {len(splits)}"
        raise CheckpointError(f"{directory}: {count}: keep them all, and set the weight of those to leave out to 0")
    if len(fingerprints) != len(splits) and not data.mixture:
        count = f"{len(fingerprints)} training splits, now there are {len(splits)}"
        raise CheckpointError(f"{directory}: was trained on {count}: give data.curriculum as it was")
    for key, trained, split in zip(training_dirs(data), fingerprints, splits, strict=not data.mixture):
        if trained != split.fingerprint:
            raise CheckpointError(
                f"{directory}: was trained on a split with fingerprint {trained[:12]}, {split.split_dir} has "
                f"{split.fingerprint[:12]}; set {key} to the same data"
            )


def read_saved_config(directory: Path, memory: Any) -> Config:
    """Return the configuration of a checkpoint or run; options added to its memory since then have their defaults.

    Args:
        memory: the present block, since memories of other kinds are not loaded.
    """
    path = directory / "config.yaml"
    saved = read_config(path)
    if dict(kinds_of(saved.memory)) == dict(
        kinds_of(memory)
    ):  # memories of other kinds are not loaded: that could run code
        with suppress(ConfigError):  # an option was removed since then: the resume rules report it
            return load_config([str(path)], memory_options=memory_options)
    return saved

"""Restore a job from a checkpoint, on any number of ranks, at any ZeRO stage, with any micro_lanes.

    checkpoint/resume_source.py chooses and compares the checkpoint -> restore engine, lanes, random state

Each lane moves, with memory and cursor, to the rank that holds it now. Parameters and optimizer state are read by name
and range. The plan of the data does not depend on ranks. So every rank reads what it needs, and nothing is converted.
If the division of lanes is unchanged, the random generators are restored too, and the run continues bit for bit;
otherwise dropout uses new random numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.lane_states import Lanes, read_lanes, read_random_state, set_random_state
from dist_mem.checkpoint.manifest import run_of
from dist_mem.checkpoint.resume_choice import Choice, verify_together
from dist_mem.checkpoint.resume_source import Resumption, saved_config
from dist_mem.config.environment_values import hide
from dist_mem.data.lanes import training_reader
from dist_mem.data.shard import Index
from dist_mem.engine.engine import Engine
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import World, on_all_ranks
from dist_mem.tracking.provenance import code_differences
from dist_mem.training.meter import Meter

_UNREPORTED = (
    *("train.micro_lanes", "deepspeed.zero_optimization.stage"),  # reported by `_moves`
    *("name", "run_dir", "resume", "tracking.", "data.path", "data.cache"),  # places; they may hold credentials
)


class Start(NamedTuple):
    """The state that a job starts from."""

    step: int
    lanes: Lanes
    metadata: Mapping[str, Any]  # the manifest of the checkpoint; empty at step 0
    run_id: str | None  # the MLflow run; None: a new one, also when resuming from another run's checkpoint
    messages: list[str]
    tags: dict[str, str]  # for MLflow
    superseded: list[Path]  # checkpoints to rename to `.superseded` now
    broken: list[Path]  # checkpoints to rename to `.broken` at the next save


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return a different seed for every (seed, step, rank); the constants are large odd numbers."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + 1) % (1 << 63)


def restore(
    config: Any,
    world: World,
    resumption: Resumption | None,
    *,
    index: Index,
    engine: Engine,
    fresh: Lanes,
    sources: Mapping[str, str],
    commit: str | None,
) -> Start:
    """Load the chosen checkpoint, or start at step 0.

    Args:
        resumption: None: start at step 0.
        index: of the training split.
        fresh: this rank's lanes with empty memories.
        sources: of memories outside the package, name -> text.
        commit: of the running code.

    Raises:
        UnusableError: on every rank.
    """
    run_dir = Path(config.run_dir)
    if resumption is None:
        torch.manual_seed(dropout_seed(config.train.seed, 0, world.rank))
        return Start(0, fresh, {}, None, [f"starting {run_dir}"], {}, [], [])
    choice, saved, changes, _ = resumption
    directory, manifest = choice.directory, choice.manifest
    on_all_ranks(lambda: _check_data(choice, index), f"comparing the data of {directory}")
    _restore_engine(engine, choice, world)
    lanes = _restore_lanes(config, saved, world, choice, fresh)
    is_own = run_of(directory).resolve() == run_dir.resolve()
    messages = [f"passed over: {reason}" for reason in choice.passed_over]
    messages += [f"resuming from {directory}{'' if is_own else ', a checkpoint of another run'}"]
    messages += [*_moves(choice, saved, config, engine, world), *_changed_sources(choice, sources)]
    changed = ", ".join(str(change) for change in changes if not change.key.startswith(_UNREPORTED))
    messages += [f"changed since then: {changed}"] if changed else []
    tags = {} if is_own else {"dist_mem.resumed_from": hide(os.fspath(directory.absolute()))}
    if other_code := code_differences(manifest["versions"], manifest.get("commit"), commit):
        messages.append(f"warning: {directory.name} was written by other code: {other_code}")
        tags[f"dist_mem.other_code.step_{manifest['step']}"] = other_code
    run_id = manifest["mlflow_run_id"] if is_own else None
    metadata = manifest if is_own else {**manifest, "points": 0}  # the other run's points are in its own metrics.jsonl
    return Start(manifest["step"], lanes, metadata, run_id, messages, tags, choice.superseded, choice.broken)


def _check_data(choice: Choice, index: Index) -> None:
    trained = choice.manifest["data_fingerprint"]
    if trained != index.fingerprint:
        raise CheckpointError(
            f"{choice.directory}: was trained on a split with fingerprint {trained[:12]}, {index.split_dir} has "
            f"{index.fingerprint[:12]}; set data.path to the same data"
        )


def _restore_engine(engine: Engine, choice: Choice, world: World) -> None:
    reader = on_all_ranks(lambda: EngineReader(choice.directory), f"reading {choice.directory}")
    engine.restore(reader.read, reader.counters)


def _is_same_division(choice: Choice, saved: Any, config: Any, world: World) -> bool:
    """Whether this rank holds the lanes that the rank of its number held, in the same micro-batches."""
    return choice.manifest["world_size"] == world.size and saved.train.micro_lanes == config.train.micro_lanes


def _restore_lanes(config: Any, saved: Any, world: World, choice: Choice, fresh: Lanes) -> Lanes:
    """Read this rank's lanes; restore its random generators, or reseed them if the division of lanes changed."""
    directory, manifest = choice.directory, choice.manifest

    def read() -> tuple[Lanes, dict[str, Tensor] | None]:
        convert = saved.train.precision != config.train.precision
        lanes = read_lanes(
            directory, manifest, fresh.lane_ids, fresh.states, num_lanes=config.train.lanes, convert=convert
        )
        is_same = _is_same_division(choice, saved, config, world)
        return lanes, read_random_state(directory, world) if is_same else None

    lanes, random_state = on_all_ranks(read, f"reading the lanes of {directory}")
    if random_state is None:
        torch.manual_seed(dropout_seed(config.train.seed, manifest["step"], world.rank))
    else:
        set_random_state(random_state, world)
    return lanes


def _moves(choice: Choice, saved: Any, config: Any, engine: Engine, world: World) -> list[str]:
    """Return one line that lists the changes in how the work is divided; no line without changes."""
    manifest = choice.manifest
    divisions = {
        "ranks": (manifest["world_size"], world.size),
        "ZeRO stage": (manifest["zero_stage"], engine.stage),
        "micro_lanes": (saved.train.micro_lanes, config.train.micro_lanes),
    }
    moved = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in divisions.items() if was != now)
    dropout = "" if _is_same_division(choice, saved, config, world) else "; dropout uses new random numbers"
    return [f"moved: {moved}{dropout}"] if moved else []


def _changed_sources(choice: Choice, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each file of a memory outside the package that differs from the checkpoint's."""
    entries = choice.manifest["files"]
    return [
        f"{name} differs from the file that the run was trained with so far: {choice.directory / name}"
        for name, text in sources.items()
        if hashlib.sha256(text.encode()).hexdigest() != entries.get(name, {}).get("sha256")
    ]


def restore_into(job: Any, directory: Path) -> None:
    """Set a running `Job` back to a checkpoint of its run; collective.

    Parameters, optimizer, memories, cursors, random state, sums and step become those of the checkpoint, and the reader
    is reopened there. A partly accumulated update is dropped; the counts of divergences stay.

    Raises:
        UnusableError: on every rank, if the checkpoint is damaged.
    """
    config, world, train = job.config, job.world, job.config.train
    choice = Choice(directory, verify_together(directory, world), [], [], [])
    empty = [job.engine.init_state(group) for group in job.lane_ids.split(train.micro_lanes)]
    fresh = Lanes(job.lane_ids, torch.zeros_like(job.cursors), empty)
    _restore_engine(job.engine, choice, world)
    lanes = _restore_lanes(config, saved_config(directory, config), world, choice, fresh)
    job.reader.close()
    job.reader = on_all_ranks(
        lambda: training_reader(config, world_size=world.size, rank=world.rank, cursors=lanes.cursors),
        f"reading on from {directory}",
    )
    job.step, job.states, job.cursors = choice.manifest["step"], lanes.states, lanes.cursors
    job.meter = Meter(lane_segments_per_update=train.lanes * train.segments_per_update, saved=choice.manifest["meter"])

"""A job: everything a training run holds, opened fresh or from its newest checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.checkpoint import (
    CheckpointError,
    Lanes,
    check_same_world,
    choose_checkpoint,
    open_checkpoints,
    read_lanes,
    read_random_state,
)
from dist_mem.config import deepspeed_block, read_config, save_config
from dist_mem.data.directory import open_index, open_tokenizer, refresh_on_all_ranks
from dist_mem.data.lanes import LaneReader, check_tokenizer, training_reader
from dist_mem.data.remote import show
from dist_mem.data.shard import Index, fetch_shards
from dist_mem.data.stream import lanes_of_rank
from dist_mem.data.tokenizer import Tokenizer
from dist_mem.distributed import World, on_all_ranks
from dist_mem.engine import Engine, start_communication
from dist_mem.errors import UnusableError
from dist_mem.manifest import read_manifest
from dist_mem.meter import MEASUREMENTS, Meter
from dist_mem.model import MemoryLM
from dist_mem.outside_memory import sources
from dist_mem.plan import total_steps
from dist_mem.resume_rules import refuse_changes
from dist_mem.run_facts import describe_run
from dist_mem.scoring import check_scorable
from dist_mem.tracker import Tracker
from dist_mem.tracking import start_tracking


@dataclass
class Job:
    """Everything the loop touches; `step`, `states` and `cursors` move on, the rest stays."""

    config: Any
    world: World
    run_dir: Path
    index: Index
    tokenizer: Tokenizer
    engine: Engine
    reader: LaneReader
    tracker: Tracker
    meter: Meter
    sources: dict[str, str]  # of memories outside the package, as this job runs them: name -> text
    lane_ids: Tensor  # (P,) int64
    states: list[Any]  # memories after `step` updates
    cursors: Tensor  # (P, 3) int64, after `step` updates
    step: int
    total_steps: int


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for every (seed, step, rank); the constants are large odd numbers."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + 1) % (1 << 63)


def _check_data(directory: Path, manifest: dict[str, Any], index: Index) -> None:
    if manifest["data_fingerprint"] != index.fingerprint:
        raise CheckpointError(
            f"{directory}: was trained on a split with fingerprint {manifest['data_fingerprint'][:12]}, "
            f"{index.split_dir} has {index.fingerprint[:12]}; set data.path to the same data"
        )


def _build(config: Any, world: World, tokenizer: Tokenizer, lane_ids: Tensor) -> tuple[Engine, list[Any]]:
    """The engine on a freshly initialized model, and empty memories for every lane group."""
    train = config.train
    torch.manual_seed(train.seed)  # the same initial parameters on every rank
    model = MemoryLM(config, tokenizer.vocab_size)
    accumulation = len(lane_ids) // train.micro_lanes * train.segments_per_update
    engine = Engine(model, config, deepspeed_block(config), world_size=world.size, accumulation=accumulation)
    engine.train()
    return engine, [engine.init_state(group) for group in lane_ids.split(train.micro_lanes)]


class Start(NamedTuple):
    """Where a job begins."""

    step: int
    lanes: Lanes
    run_id: str | None  # of MLflow
    meter: dict[str, float]  # what it had summed
    messages: list[str]


def _restore(
    config: Any, world: World, index: Index, engine: Engine, fresh: Lanes, memory_sources: Mapping[str, str]
) -> Start:
    """Load the newest checkpoint that verifies, or begin at step 0."""
    chosen, passed_over = choose_checkpoint(Path(config.run_dir))
    messages = [f"passed over: {reason}" for reason in passed_over]
    if chosen is None:
        torch.manual_seed(_dropout_seed(config.train.seed, 0, world.rank))
        return Start(0, fresh, None, {}, [*messages, f"starting {config.run_dir}"])
    manifest = read_manifest(chosen)
    refuse_changes(read_config(chosen / "config.yaml"), config)
    check_same_world(chosen, manifest, world, engine.stage)
    _check_data(chosen, manifest, index)
    engine.load(chosen)
    lanes = read_lanes(chosen, manifest, fresh.lane_ids, fresh.states)
    read_random_state(chosen, world)
    for name, text in memory_sources.items():
        if hashlib.sha256(text.encode()).hexdigest() != manifest["files"][name]["sha256"]:
            messages.append(f"{name} is not what the run was trained with so far: {chosen / name} was")
    meter = manifest.get("meter", {})  # checkpoints of before 2026-11-20 have none: counts begin anew
    return Start(manifest["step"], lanes, manifest["mlflow_run_id"], meter, [*messages, f"resuming from {chosen}"])


def open_job(config: Any, world: World) -> Job:
    """Build model, engine, reader and tracker; restore the newest checkpoint where there is one.

    Raises:
        UnusableError: data, configuration, checkpoints or run directory; on every rank.
    """
    try:
        return _open_job(config, world)
    except UnusableError:
        raise
    except ValueError as error:  # a memory, the plan or DeepSpeed refuses what the configuration says
        raise UnusableError(str(error)) from error


def _open_data(config: Any) -> tuple[Tokenizer, list[Index]]:
    """Tokenizer and the splits of `_splits`; what evaluation will need is looked at now and not hours later."""
    tokenizer = open_tokenizer(config.data)
    indexes = [open_index(config.data, split) for split in _splits(config)]
    for index in indexes:
        check_tokenizer(index, tokenizer)
    for index in indexes[1:]:
        check_scorable(index, tokenizer)
        fetch_shards(index)
    return tokenizer, indexes


def _splits(config: Any) -> list[str]:
    return [config.data.train_split, *([config.eval.split] if config.eval.every else [])]


def _open_job(config: Any, world: World) -> Job:
    train, run_dir = config.train, Path(config.run_dir)
    refresh_on_all_ranks(config.data, _splits(config))
    tokenizer, indexes = on_all_ranks(lambda: _open_data(config), f"opening {show(config.data.path)}")
    index = indexes[0]
    lane_ids = torch.tensor(
        lanes_of_rank(train.lanes, world_size=world.size, rank=world.rank, micro_lanes=train.micro_lanes)
    )
    memory_sources = on_all_ranks(lambda: sources(config.memory), "reading the memory")
    on_all_ranks(start_communication, "starting DeepSpeed")
    engine, fresh = _build(config, world, tokenizer, lane_ids)
    cursors = torch.zeros(len(lane_ids), 3, dtype=torch.int64)
    start = _restore(config, world, index, engine, Lanes(lane_ids, cursors, fresh), memory_sources)
    reader = on_all_ranks(
        lambda: training_reader(config, world_size=world.size, rank=world.rank, cursors=start.lanes.cursors),
        f"reading {index.split_dir}",
    )
    steps = total_steps(config, reader.plan)

    def open_run_dir() -> Tracker:
        if world.rank != 0:
            return Tracker()
        open_checkpoints(run_dir)  # now, and not at the first save, hours later
        save_config(config, run_dir / "config.yaml")
        tracker = start_tracking(
            config,
            run_dir=run_dir,
            run_id=start.run_id,
            total_steps=steps,
            first_step=start.step,
            measurements=MEASUREMENTS,
        )
        if config.tracking.mlflow:
            describe_run(tracker, config, world, indexes, memory_sources)
        return tracker

    tracker = on_all_ranks(open_run_dir, f"opening {run_dir}")
    for message in start.messages:
        tracker.message(message)
    return Job(
        config=config,
        world=world,
        run_dir=run_dir,
        index=index,
        tokenizer=tokenizer,
        engine=engine,
        reader=reader,
        tracker=tracker,
        meter=Meter(lane_segments_per_update=train.lanes * train.segments_per_update, saved=start.meter),
        sources=memory_sources,
        lane_ids=lane_ids,
        states=start.lanes.states,
        cursors=start.lanes.cursors,
        step=start.step,
        total_steps=steps,
    )

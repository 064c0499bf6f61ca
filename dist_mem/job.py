"""A job: everything a training run holds, opened fresh or from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from dist_mem.checkpoint import (
    CheckpointError,
    Lanes,
    check_same_world,
    choose_checkpoint,
    read_lanes,
    read_random_state,
    save_checkpoint,
)
from dist_mem.config import ConfigError, deepspeed_block, read_config, save_config, to_yaml
from dist_mem.data.lanes import LaneReader, check_tokenizer, training_reader
from dist_mem.data.shard import Index, read_index
from dist_mem.data.stream import lanes_of_rank
from dist_mem.data.tokenizer import Tokenizer, load_tokenizer
from dist_mem.distributed import AgreedError, World, agree_all_well
from dist_mem.engine import Engine
from dist_mem.evaluate import evaluate_split
from dist_mem.manifest import read_manifest
from dist_mem.meter import Meter
from dist_mem.model import MemoryLM
from dist_mem.plan import total_steps
from dist_mem.resume_rules import refuse_changes
from dist_mem.tracking import Tracker, start_tracking


class UnusableError(ValueError):
    """The data or the configuration cannot be used as they are; raised on every rank, says what to change."""


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
    messages: list[str]


def _restore(config: Any, world: World, index: Index, engine: Engine, fresh: Lanes) -> Start:
    """Load the newest checkpoint that verifies, or begin at step 0."""
    chosen, passed_over = choose_checkpoint(Path(config.run_dir))
    messages = [f"passed over: {reason}" for reason in passed_over]
    if chosen is None:
        torch.manual_seed(_dropout_seed(config.train.seed, 0, world.rank))
        return Start(0, fresh, None, [*messages, f"starting {config.run_dir}"])
    manifest = read_manifest(chosen)
    refuse_changes(read_config(chosen / "config.yaml"), config)
    check_same_world(chosen, manifest, world, engine.stage)
    _check_data(chosen, manifest, index)
    engine.load(chosen)
    lanes = read_lanes(chosen, manifest, fresh.lane_ids, fresh.states)
    read_random_state(chosen, world)
    return Start(manifest["step"], lanes, manifest["mlflow_run_id"], [*messages, f"resuming from {chosen}"])


def open_job(config: Any, world: World) -> Job:
    """Build model, engine, reader and tracker; restore the newest checkpoint where there is one.

    Raises:
        UnusableError: the data, the configuration, or a file of the run directory; on every rank.
        ConfigError: the configuration does not fit the one the run began with; on every rank.
        CheckpointError: there are checkpoints, but none can be used; on every rank.
    """
    try:
        return _open_job(config, world)
    except ConfigError:
        raise
    except ValueError as error:
        raise UnusableError(str(error)) from error


ResultT = TypeVar("ResultT")


def on_all_ranks(work: Callable[[], ResultT], what: str) -> ResultT:
    """The result of `work`, which uses what only some ranks may lack: files of their nodes, the run directory.

    Raises:
        UnusableError: on every rank, if `work` failed on any; else the others would wait for it without an end.
    """
    error: Exception | None = None
    result: ResultT | None = None
    try:
        result = work()
    except (ValueError, OSError) as caught:
        error = caught
    try:
        agree_all_well(error, what)
    except AgreedError as told:
        raise UnusableError(str(error or told)) from error
    return cast(ResultT, result)


def _open_data(config: Any) -> tuple[Tokenizer, Index]:
    """Tokenizer and training index; what evaluation will need is looked at now and not hours later."""
    data = Path(config.data.path)
    tokenizer, index = load_tokenizer(data), read_index(data / config.data.train_split)
    splits = [index, *([read_index(data / config.eval.split)] if config.eval.every else [])]
    for split in splits:
        check_tokenizer(split, tokenizer)
    return tokenizer, index


def _open_job(config: Any, world: World) -> Job:
    train, run_dir = config.train, Path(config.run_dir)
    tokenizer, index = on_all_ranks(lambda: _open_data(config), f"opening {config.data.path}")
    lane_ids = torch.tensor(
        lanes_of_rank(train.lanes, world_size=world.size, rank=world.rank, micro_lanes=train.micro_lanes)
    )
    engine, fresh = _build(config, world, tokenizer, lane_ids)
    cursors = torch.zeros(len(lane_ids), 3, dtype=torch.int64)
    start = _restore(config, world, index, engine, Lanes(lane_ids, cursors, fresh))
    reader = on_all_ranks(
        lambda: training_reader(config, world_size=world.size, rank=world.rank, cursors=start.lanes.cursors),
        f"reading {index.split_dir}",
    )
    steps = total_steps(config, reader.plan)

    def open_run_dir() -> Tracker:
        if world.rank == 0:
            save_config(config, run_dir / "config.yaml")
        return start_tracking(
            config, rank=world.rank, run_dir=run_dir, run_id=start.run_id, total_steps=steps, first_step=start.step
        )

    tracker = on_all_ranks(open_run_dir, f"opening {run_dir}")
    tracker.log_artifact(run_dir / "config.yaml")
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
        meter=Meter(lane_segments_per_update=train.lanes * train.segments_per_update),
        lane_ids=lane_ids,
        states=start.lanes.states,
        cursors=start.lanes.cursors,
        step=start.step,
        total_steps=steps,
    )


def save(job: Job) -> None:
    """Write the checkpoint of the present step; every rank calls it."""
    facts = {
        "mlflow_run_id": job.tracker.run_id,
        "data_fingerprint": job.index.fingerprint,
        "tokenizer_fingerprint": job.tokenizer.fingerprint,
    }
    lanes = Lanes(job.lane_ids, job.cursors, job.states)
    path = save_checkpoint(
        job.run_dir,
        step=job.step,
        engine=job.engine,
        lanes=lanes,
        config_text=to_yaml(job.config),
        world=job.world,
        facts=facts,
    )
    job.tracker.message(f"step {job.step}: saved {path}")


def evaluate_now(job: Job) -> None:
    """Score the validation split with fresh lanes; training goes on as if it had not happened."""
    engine = job.engine
    engine.train(False)
    report = evaluate_split(
        engine,
        engine.init_state,
        config=job.config,
        split=job.config.eval.split,
        tokenizer=job.tokenizer,
        world=job.world,
    )
    engine.train(True)
    job.tracker.log(job.step, report.figures())

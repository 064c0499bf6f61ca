"""The job: the objects of a training run, created for a new run or restored from a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_mem.checkpoint.lane_states import Lanes, open_checkpoints
from dist_mem.checkpoint.resume_source import Resumption
from dist_mem.checkpoint.saver import Saver
from dist_mem.config import deepspeed_block, save_config
from dist_mem.data.batch_plan import idle_work, num_readable, total_steps
from dist_mem.data.directory import open_index, open_tokenizer, refresh_on_all_ranks
from dist_mem.data.lanes import LaneReader, check_tokenizer, training_reader
from dist_mem.data.plan import lanes_of_rank
from dist_mem.data.remote.fetch import is_remote, show
from dist_mem.data.shard import Index, fetch_shards
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.engine.engine import Engine, start_communication
from dist_mem.engine.shared_memory import drop_buffer_name
from dist_mem.errors import StoppedEarlyError, UnusableError
from dist_mem.evaluation.memory_estimate import evaluated_lanes, refuse_what_cannot_fit, training_parts
from dist_mem.evaluation.scoring import check_scorable
from dist_mem.evaluation.stream_scoring import stream_lengths
from dist_mem.gpt2.folder import load_pretrained
from dist_mem.memory.outside import sources
from dist_mem.model import MemoryLM
from dist_mem.runtime.distributed import World, announced, gather_objects, on_all_ranks
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.stragglers import ForwardTimer, Stragglers
from dist_mem.runtime.watchdog import UNWATCHED, beat
from dist_mem.tracking.provenance import running_commit
from dist_mem.tracking.run_metadata import describe_run
from dist_mem.tracking.start import start_tracking
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.divergence import Divergence
from dist_mem.training.meter import MEASUREMENTS, Meter
from dist_mem.training.resume import restore

LONGEST_GUESS = 100.0  # seconds; limit of the estimate of a save by the restore, which may wait for a cold disk


@dataclass
class Job:
    """The objects of a running training. The loop advances `step`, `states` and `cursors`; the rest stays."""

    config: Any
    world: World
    run_dir: Path
    index: Index
    tokenizer: Tokenizer
    engine: Engine
    reader: LaneReader
    tracker: Tracker
    meter: Meter
    saver: Saver
    validation: dict[str, float] | None  # step and loss of the newest evaluation
    divergence: Divergence
    stragglers: Stragglers
    commit: str | None  # of the running code, if known; only on rank 0
    sources: dict[str, str]  # of memories outside the package, as loaded by this job: name -> text
    lane_ids: Tensor  # (P,) int64
    states: list[Any]  # memories after `step` updates
    cursors: Tensor  # (P, 3) int64, after `step` updates
    step: int
    total_steps: int


def _load_pretrained(config: Any, world: World, model: MemoryLM, vocab_size: int) -> list[str]:
    """Load `model.pretrained`; return messages about it."""
    folder = config.model.pretrained
    new = on_all_ranks(lambda: load_pretrained(model, config, vocab_size), f"reading {folder}")
    return [f"weights of {folder}" + (f"; {len(new)} new tensors, as {new[0]}" if new else "")]


def _build(
    config: Any, world: World, tokenizer: Tokenizer, lane_ids: Tensor, *, is_resumed: bool
) -> tuple[Engine, list[Any], list[str]]:
    """Return the engine with a newly initialized model, empty memories of every lane group, and messages."""
    train = config.train
    torch.manual_seed(train.seed)  # the same initial parameters on every rank
    model = MemoryLM(config, tokenizer.vocab_size)
    begins_pretrained = config.model.pretrained is not None and not is_resumed
    messages = _load_pretrained(config, world, model, tokenizer.vocab_size) if begins_pretrained else []
    accumulation = len(lane_ids) // train.micro_lanes * train.segments_per_update
    engine = Engine(
        model,
        config,
        deepspeed_block(config),
        world_size=world.size,
        accumulation=accumulation,
        apart=model.names_apart(),
    )
    engine.train()
    return engine, [engine.init_state(group) for group in lane_ids.split(train.micro_lanes)], messages


def open_job(config: Any, world: World, resumption: Resumption | None, stop_signal: StopSignal) -> Job:
    """Build model, engine, reader and tracker; restore the checkpoint to resume from, if there is one.

    Args:
        resumption: from `find_resumption`.
        stop_signal: Ctrl-C ends the start between two of its parts.

    Raises:
        UnusableError: on every rank; data, configuration, checkpoints or run directory cannot be used.
        StoppedEarlyError: on every rank.
    """
    try:
        return _open_job(config, world, resumption, stop_signal)
    except UnusableError:
        raise
    except ValueError as error:  # a memory, the plan or DeepSpeed rejects a value of the configuration
        raise UnusableError(str(error)) from error


def _compare_ranks(config: Any, world: World, engine: Engine) -> Stragglers:
    """Return the detector of slow ranks; collective. It is off at ZeRO stage 3, where forwards wait for each other."""
    threshold = config.watchdog.straggler
    is_on = threshold is not None and world.size > 1 and engine.stage < 3
    return Stragglers(
        ForwardTimer(engine.module, world.device) if is_on else None,
        rank=world.rank,
        nodes=gather_objects(node_name()),
        threshold=threshold or 0.0,
    )


def _open_data(config: Any) -> tuple[Tokenizer, list[Index]]:
    """Open the tokenizer and the splits; check now what evaluation will need hours later."""
    tokenizer = open_tokenizer(config.data)
    indexes = [open_index(config.data, split) for split in _splits(config)]
    for index in indexes:
        check_tokenizer(index, tokenizer)
    for index in indexes[1:]:
        check_scorable(index, tokenizer)
        if config.eval.layout == "stream":
            stream_lengths(index, num_lanes=config.eval.lanes, max_document_len=config.eval.max_document_len)
        fetch_shards(index)
    return tokenizer, indexes


def _refuse_what_cannot_fit(config: Any, world: World, tokenizer: Tokenizer, indexes: list[Index]) -> None:
    """Before anything is allocated; every rank calls it. Raises UnusableError on every rank."""
    read_at_once = [evaluated_lanes(config, index) for index in indexes[1:]]
    parts = training_parts(
        config,
        tokenizer.vocab_size,
        world_size=world.size,
        on_gpu=world.device.type == "cuda",
        eval_lanes=max(read_at_once, default=0),
    )
    refuse_what_cannot_fit(parts, world.device, gather=gather_objects)


def _splits(config: Any) -> list[str]:
    return [config.data.train_split, *([config.eval.split] if config.eval.every else [])]


def leave_if_interrupted(stop_signal: StopSignal, *, by_any: bool = False) -> None:
    """End the start, between two of its parts, if Ctrl-C was pressed; collective.

    Signals of schedulers take effect after the first step, so that a job that is preempted at each start progresses.

    Args:
        by_any: end it after any signal, because this part of the start has failed and the signal is the reason.

    Raises:
        StoppedEarlyError: on every rank.
    """
    received = [name for name in gather_objects(stop_signal.received) if name and (by_any or name == "SIGINT")]
    if received:
        raise StoppedEarlyError(received[0])


def _start_communication(stop_signal: StopSignal) -> None:
    """Call `start_communication` on all ranks. It may fail because Ctrl-C in a terminal also reaches the compiler."""
    try:
        on_all_ranks(start_communication, "starting DeepSpeed")
    except UnusableError:
        leave_if_interrupted(stop_signal, by_any=True)
        raise
    leave_if_interrupted(stop_signal)


def _open_job(config: Any, world: World, resumption: Resumption | None, stop_signal: StopSignal) -> Job:
    train, run_dir = config.train, Path(config.run_dir)
    beat(UNWATCHED if is_remote(config.data.path) or config.data.stage != "none" else "opening")
    with announced(f"opening {show(config.data.path)}"):
        refresh_on_all_ranks(config.data, _splits(config))
        tokenizer, indexes = on_all_ranks(lambda: _open_data(config), f"opening {show(config.data.path)}")
    leave_if_interrupted(stop_signal)
    beat("opening")
    index = indexes[0]
    lane_ids = torch.tensor(
        lanes_of_rank(train.lanes, world_size=world.size, rank=world.rank, micro_lanes=train.micro_lanes)
    )
    memory_sources = on_all_ranks(lambda: sources(config.memory), "reading the memory")
    _refuse_what_cannot_fit(config, world, tokenizer, indexes)
    _start_communication(stop_signal)
    drop_buffer_name(world.rank)
    with announced("building the model"):
        engine, fresh, messages = _build(config, world, tokenizer, lane_ids, is_resumed=resumption is not None)
    leave_if_interrupted(stop_signal)
    cursors = torch.zeros(len(lane_ids), 3, dtype=torch.int64)
    commit = running_commit() if world.rank == 0 else None
    beat("restoring")
    began = time.perf_counter()
    with announced("restoring the checkpoint"):
        start = restore(
            config,
            world,
            resumption,
            index=index,
            engine=engine,
            fresh=Lanes(lane_ids, cursors, fresh),
            sources=memory_sources,
            commit=commit,
        )
    leave_if_interrupted(stop_signal)
    restored_seconds = time.perf_counter() - began + (0.0 if resumption is None else resumption.seconds)
    beat("opening")
    reader = on_all_ranks(
        lambda: training_reader(config, world_size=world.size, rank=world.rank, cursors=start.lanes.cursors),
        f"reading {index.split_dir}",
    )
    steps = total_steps(config, reader.plan)

    def open_run_dir() -> Tracker:
        if world.rank != 0:
            return Tracker()
        open_checkpoints(run_dir, set_aside=start.superseded)  # now, not at the first save hours later
        save_config(config, run_dir / "config.yaml")
        tracker = start_tracking(
            config,
            run_dir=run_dir,
            run_id=start.run_id,
            total_steps=steps,
            first_step=start.step,
            num_points=start.metadata.get("points", 0),
            measurements=MEASUREMENTS,
        )
        if config.tracking.mlflow:
            describe_run(tracker, config, world, indexes, memory_sources)
            tracker.log_tags(start.tags)
        return tracker

    with announced(f"opening {run_dir}" + (" and MLflow" if config.tracking.mlflow else "")):
        tracker = on_all_ranks(open_run_dir, f"opening {run_dir}")
    waste = idle_work(train, world.size, num_documents=num_readable(reader.plan))
    for message in [*start.messages, *messages, *([": ".join(waste)] if waste else [])]:
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
        meter=Meter(
            lane_segments_per_update=train.lanes * train.segments_per_update, saved=start.metadata.get("meter")
        ),
        # The time of a restore is the estimate for a save until one is measured.
        saver=Saver(
            run_dir,
            world,
            config.checkpoint,
            flush_records=tracker.flush,
            broken=start.broken,
            expected_seconds=min(restored_seconds, LONGEST_GUESS),
        ),
        validation=start.metadata.get("validation"),
        divergence=Divergence(config.divergence, start.metadata.get("divergence", {})),
        stragglers=_compare_ranks(config, world, engine),
        commit=commit,
        sources=memory_sources,
        lane_ids=lane_ids,
        states=start.lanes.states,
        cursors=start.lanes.cursors,
        step=start.step,
        total_steps=steps,
    )

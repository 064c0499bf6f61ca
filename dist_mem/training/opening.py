"""Open a training run: create its parts for a new run, or restore them from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from dist_mem.block import ModelSpec
from dist_mem.checkpoint.finished_file import unmark_finished
from dist_mem.checkpoint.lane_states import open_checkpoints
from dist_mem.checkpoint.resume_source import Resumption, data_fingerprint
from dist_mem.checkpoint.retention import unsaved_steps
from dist_mem.checkpoint.saver import Saver
from dist_mem.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    TrainConfig,
    WatchdogConfig,
    save_config,
    to_yaml,
)
from dist_mem.config.environment_values import as_written
from dist_mem.config.memory_blocks import describe_memory
from dist_mem.config.resume_rules import checksums_to_keep
from dist_mem.data.batch_plan import idle_work, num_readable, total_steps
from dist_mem.data.curriculum import answers_of, stages_of, training_dirs, training_splits
from dist_mem.data.directory import open_index, open_tokenizer, refresh_on_all_ranks
from dist_mem.data.lanes import check_tokenizer
from dist_mem.data.mixture import MixturePlan, describe_sources, source_names
from dist_mem.data.plan import lanes_of_rank
from dist_mem.data.remote.fetch import is_remote, show
from dist_mem.data.shard import Index, cancel_fetches, fetch_shards
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import TOKENIZER_DIR, tokenizer_files
from dist_mem.engine.engine import Engine
from dist_mem.engine.placement import place_parts
from dist_mem.errors import RunError, run_error
from dist_mem.estimate.counting import Flops, NotCountedError, flops_per_token
from dist_mem.estimate.memory import evaluated_lanes, fits_without_counting, refuse_what_cannot_fit, training_parts
from dist_mem.estimate.zero import TrainingJob, job_of
from dist_mem.evaluation.scoring import lengths_to_score, refuse_without_targets
from dist_mem.hf.folder import load_pretrained
from dist_mem.hf.vocabulary import compare_tokens
from dist_mem.memory.base import describe_back_ends
from dist_mem.memory.outside import sources
from dist_mem.memory.parts.kernel_choice import describe_kernels
from dist_mem.model import MemoryLM, describe
from dist_mem.nn.attention_check import check_attention
from dist_mem.nn.layers import DTYPES, describe_attention
from dist_mem.runtime.distributed import World, announce, gather_objects, on_all_ranks
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.machine_memory import return_free_memory
from dist_mem.runtime.rounds import work_in_rounds
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.versions import machine_of
from dist_mem.supervision.stragglers import ForwardTimer, Stragglers
from dist_mem.supervision.watchdog import UNWATCHED, beat
from dist_mem.tracking.own_sinks import sink_sources
from dist_mem.tracking.provenance import running_commit
from dist_mem.tracking.start import start_tracking
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.agreement import LocalFailure
from dist_mem.training.compiling import compile_model, leave_if_interrupted, open_communication
from dist_mem.training.context import Context
from dist_mem.training.describe_run import describe_run
from dist_mem.training.divergence import Divergence
from dist_mem.training.feed import Data, Feed
from dist_mem.training.goodput import open_goodput
from dist_mem.training.history import begin_part
from dist_mem.training.meter import MEASUREMENTS, Meter
from dist_mem.training.mfu import find_utilisation
from dist_mem.training.profile import Profile, refuse_profile_outside
from dist_mem.training.reporting import Reporting
from dist_mem.training.resume import StartState, start
from dist_mem.training.saving import Saving
from dist_mem.training.state import TrainState

LONGEST_GUESS = 100.0  # seconds; limit of the estimate of a save by the restore, which may wait for a cold disk


def open_run(
    config: Config,
    world: World,
    resumption: Resumption | None,
    stop_signal: StopSignal,
    *,
    tracker: Tracker | None = None,
) -> tuple[Context, TrainState]:
    """Build model, engine, feed and tracker; restore the checkpoint to resume from, if there is one; collective.

    Args:
        resumption: from `find_resumption`.
        stop_signal: Ctrl-C ends the start between two of its parts.
        tracker: used in place of the run's own; then nothing is written into the run directory.

    Raises:
        RunError: on every rank; data, configuration, checkpoints or run directory cannot be used, or
            `StoppedEarlyError`.
    """
    with ExitStack() as on_failure:
        try:
            found = _open_run(config, world, resumption, stop_signal, tracker, on_failure)
        except RunError:
            raise
        except ValueError as error:  # a memory, the plan or DeepSpeed rejects a value of the configuration
            raise run_error(error) from error
        on_failure.pop_all()
    return found


def _open_run(
    config: Config,
    world: World,
    resumption: Resumption | None,
    stop_signal: StopSignal,
    tracker: Tracker | None,
    on_failure: ExitStack,
) -> tuple[Context, TrainState]:
    data = _open_data(config.data, config.eval)
    tokenizer = data.tokenizer
    leave_if_interrupted(stop_signal)
    memory_sources = on_all_ranks(lambda: sources(config.memory), "reading the memory")
    of_sinks = config.tracking.sinks if world.rank == 0 else []
    own_code = memory_sources | on_all_ranks(lambda: sink_sources(of_sinks), "reading tracking.sinks")
    beat("opening")
    job = job_of(config, tokenizer.vocab_size, world_size=world.size, on_gpu=world.device.type == "cuda")
    _refuse_what_cannot_fit(job, config.eval, world, data)
    open_communication(world, stop_signal)
    lane_ids = torch.tensor(lanes_of(config.train, world))
    with announce("building the model"):
        engine, messages = _build(job, world, tokenizer, is_resumed=resumption is not None)
    with announce("checking kernels"):
        messages += on_all_ranks(lambda: _check_kernels(config.train, engine.module, world), "checking kernels")
    messages += engine.rules
    messages += _describe_windows(config.train.bptt_segments, config.memory, engine.module)
    leave_if_interrupted(stop_signal)
    commit = running_commit() if world.rank == 0 else None
    beat("restoring")
    with announce("restoring the checkpoint"):
        begin = start(
            config,
            world,
            resumption,
            splits=data.splits,
            engine=engine,
            lane_ids=lane_ids,
            sources=memory_sources,
            commit=commit,
        )
    leave_if_interrupted(stop_signal)
    beat("opening")
    messages += compile_model(config.train, engine, stop_signal)
    failure = LocalFailure()
    lane_segments = config.train.global_batch_size * config.train.segments_per_update
    try:
        flops: Flops | None = flops_per_token(job.spec)
    except NotCountedError as error:
        flops = None
        messages.append(f"no mfu is logged: {error}")
    utilisation, unknown = find_utilisation(config.train, flops, world)
    meter = Meter(lane_segments_per_update=lane_segments, utilisation=utilisation, saved=begin.metadata.get("meter"))
    feed = Feed((config.data, config.train), world, meter, failure, data=data, lane_ids=lane_ids, state=begin.state)
    num_steps = total_steps(config.train, config.schedule, feed.plan)
    refuse_profile_outside(config.train, num_steps)
    writes = tracker is None and world.rank == 0
    indexes = [*data.splits, *data.evaluated]
    tracker = tracker or _open_run_dir(config, world, begin, indexes, own_code, job.spec, flops, num_steps, on_failure)
    if isinstance(feed.plan, MixturePlan) and world.rank == 0:
        messages += describe_sources(feed.plan, source_names(config.data), num_steps)
    waste = idle_work(config.train, world.size, num_documents=num_readable(feed.plan))
    messages += [f"checkpoints: {line}" for line in unsaved_steps(config.checkpoint)]
    for message in [*begin.messages, *messages, *unknown, *([": ".join(waste)] if waste else [])]:
        tracker.message(message)
    divergence = Divergence(config.divergence, begin.metadata.get("divergence", {}))
    reporting = Reporting(
        rules=config.tracking,
        total_steps=num_steps,
        world=world,
        engine=engine,
        tracker=tracker,
        meter=meter,
        goodput=open_goodput(Path(config.run_dir), begin.metadata.get("goodput", {}), writes=writes),
        profile=Profile(config.train, config.run_dir, world, tracker, failure),
        stragglers=_compare_ranks(config.watchdog, world, engine),
        failure=failure,
    )
    saving = Saving(
        config.checkpoint,
        _open_saver(config.checkpoint, config.run_dir, world, begin, tracker),
        engine,
        divergence,
        reporting,
        lane_ids=lane_ids,
        metadata={
            "commit": commit,
            "data_fingerprint": data_fingerprint(data.splits),
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "environment": checksums_to_keep(config),
            "machine": machine_of(world.device),
        },
        small_files=_small_files({"config.yaml": to_yaml(config), **own_code}, tokenizer),
    )
    return Context(config, world, engine, divergence, num_steps, feed, reporting, saving), begin.state


def _small_files(texts: Mapping[str, str], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that every checkpoint contains beside its tensors: name -> content."""
    files = {name: text.encode() for name, text in texts.items()}
    return files | {f"{TOKENIZER_DIR}/{name}": content for name, content in tokenizer_files(tokenizer).items()}


def _check_kernels(train: TrainConfig, model: MemoryLM, world: World) -> list[str]:
    """Return what computes attention and memories, after the comparison of kernels on a GPU with what they replace."""
    device, dtype, seg_len = world.device, DTYPES[train.precision], train.seg_len
    if device.type == "cuda":  # elsewhere every operation is torch's, and tested
        check_attention(model, device, dtype, seg_len)
    return [
        *describe_attention(model, device.type, seg_len),
        *describe_kernels(model, device.type, seg_len),
        *describe_back_ends(model, device.type, dtype),
    ]


def _describe_windows(num_segments: int, memory: Mapping[str, Any], model: MemoryLM) -> list[str]:
    """Return a message if the length of windows does not fit the memory."""
    kind, carries = describe_memory(memory), any(each.carries_gradient for each in model.memories())
    if num_segments > 1 and not carries:
        return [f"train.bptt_segments is {num_segments}, but 1 would do: no gradient flows through the state of {kind}"]
    if num_segments == 1 and carries:
        return [f"train.bptt_segments is 1: {kind} gets no gradient from later segments; see docs/howto/bptt.md"]
    return []


def lanes_of(train: TrainConfig, world: World) -> range:
    """Return the numbers of this rank's lanes."""
    return lanes_of_rank(
        train.global_batch_size, world_size=world.size, rank=world.rank, micro_lanes=train.micro_batch_size
    )


def _build(job: TrainingJob, world: World, tokenizer: Tokenizer, *, is_resumed: bool) -> tuple[Engine, list[str]]:
    """Return the engine with a newly initialized model, and messages about its pretrained weights."""
    train, sizes, block = job.spec.train, job.spec.model, job.deepspeed
    pretrained = sizes.pretrained
    reads_weights = pretrained is not None and not is_resumed
    # Weights are read into a whole model.
    placement = None if reads_weights else place_parts(train, block, world.device, world_size=world.size)
    torch.manual_seed(train.seed)  # the same initial parameters on every rank
    model = MemoryLM(job.spec, placement)
    return_free_memory()  # of the parts that were whole, before DeepSpeed allocates the optimizer
    messages = []
    if reads_weights:
        new, remark = on_all_ranks(lambda: _read_pretrained(model, sizes, tokenizer), f"reading {pretrained}")
        messages = [f"weights of {pretrained}" + (f"; {len(new)} new tensors, as {new[0]}" if new else "")]
        messages += [remark] if remark else []
    engine = Engine(
        model,
        train,
        job.optimizer,
        block,
        world_size=world.size,
        accumulation=job.batch.backwards,
        auxiliary_parameters=model.auxiliary_parameter_names(),
    )
    engine.train()
    return engine, messages


def _read_pretrained(model: MemoryLM, sizes: ModelConfig, tokenizer: Tokenizer) -> tuple[list[str], str | None]:
    new = load_pretrained(model, sizes, tokenizer.vocab_size)
    return new, compare_tokens(sizes, tokenizer)


def _open_run_dir(
    config: Config,
    world: World,
    begin: StartState,
    indexes: Sequence[Index],
    own_code: dict[str, str],
    spec: ModelSpec,
    flops: Flops | None,
    total_steps: int,
    on_failure: ExitStack,
) -> Tracker:
    """Open checkpoints, config.yaml, tracking, history on rank 0; return a tracker that records nothing elsewhere."""
    run_dir = Path(config.run_dir)

    def open_on_rank0() -> Tracker:
        if world.rank != 0:
            return Tracker()
        open_checkpoints(run_dir, set_aside=begin.superseded)  # now, not at the first save hours later
        unmark_finished(run_dir)
        save_config(config, run_dir / "config.yaml")
        tracker = start_tracking(
            config,
            run_dir=run_dir,
            total_steps=total_steps,
            first_step=begin.state.step,
            num_points=begin.metadata.get("points"),
            measurements=MEASUREMENTS,
        )
        on_failure.callback(tracker.close, "FAILED")
        if config.tracking.mlflow:
            paths = [as_written(config, key) for key in training_dirs(config.data)]
            evaluated = as_written(config, "data.path")
            describe_run(tracker, describe(spec), paths, evaluated, world, indexes, own_code, flops)
            tracker.log_tags(begin.tags)
        first_trained = begin.metadata.get("divergence", {}).get("first_trained", 0)
        num_metered = int(begin.metadata.get("meter", {}).get("steps", 0))
        text = to_yaml(config)
        begin_part(run_dir, text, world, begin.state, first_trained=first_trained, num_metered=num_metered)
        return tracker

    with announce(f"opening {run_dir}" + (" and MLflow" if config.tracking.mlflow else "")):
        return on_all_ranks(open_on_rank0, f"opening {run_dir}")


def _open_saver(checkpoint: CheckpointConfig, run_dir: str, world: World, begin: StartState, tracker: Tracker) -> Saver:
    """Return the saver; until a save is measured, it expects one to take as long as the restore took."""
    return Saver(
        Path(run_dir),
        world,
        checkpoint,
        flush_records=tracker.flush,
        broken=begin.broken,
        expected_seconds=min(begin.seconds, LONGEST_GUESS),
        step=begin.state.step,
    )


def _compare_ranks(watchdog: WatchdogConfig, world: World, engine: Engine) -> Stragglers:
    """Return the detector of slow ranks; collective. It is off at ZeRO stage 3, where forwards wait for each other."""
    threshold = watchdog.straggler
    is_on = threshold is not None and world.size > 1 and engine.stage < 3
    return Stragglers(
        ForwardTimer(engine.module, world.device) if is_on else None,
        rank=world.rank,
        nodes=gather_objects(node_name()),
        threshold=threshold or 0.0,
    )


def _open_data(data: DataConfig, eval_config: EvalConfig) -> Data:
    """Open the data of a run; fetch what a server has; collective."""
    beat(UNWATCHED if is_remote(data.path) or data.stage != "none" else "opening")
    evaluated = [eval_config.split] if eval_config.every else []
    with announce(f"opening {show(data.path)}"):
        refresh_on_all_ranks(data, evaluated if data.mixture else [data.train_split, *evaluated])
        for one in training_dirs(data).values():
            if one.path != data.path or data.mixture:
                refresh_on_all_ranks(one, [one.train_split, *(evaluated if data.until_accuracy else [])])
        what = f"opening {show(data.path)}"
        tokenizer = on_all_ranks(lambda: open_tokenizer(data), what)
        indexes = on_all_ranks(lambda: [open_index(data, split) for split in evaluated], what)

        def check() -> None:
            check_evaluated(indexes, tokenizer, eval_config)

        work_in_rounds(check, what, cancel=lambda: cancel_fetches(indexes))  # it fetches what a server has
        splits = on_all_ranks(lambda: _open_training(data, eval_config, tokenizer), "opening the training data")
    return Data(tokenizer, splits, indexes)


def _open_training(data: DataConfig, eval_config: EvalConfig, tokenizer: Tokenizer) -> list[Index]:
    """Open the training splits of all stages or sources; check the others by which stages end."""
    splits = training_splits(data, tokenizer)
    for stage in stages_of(data)[:-1] if data.until_accuracy else ():
        lengths_to_score(answers_of(stage, eval_config.split), tokenizer, eval_config)
    return splits


def check_evaluated(indexes: Sequence[Index], tokenizer: Tokenizer, eval_config: EvalConfig) -> None:
    """Check now what an evaluation of these splits will need hours later, and fetch their tars."""
    for index in indexes:
        check_tokenizer(index, tokenizer)
        lengths = lengths_to_score(index, tokenizer, eval_config)
        fetch_shards(index)
        refuse_without_targets(index, lengths)


def _refuse_what_cannot_fit(job: TrainingJob, eval_config: EvalConfig, world: World, data: Data) -> None:
    """Before anything is allocated; every rank calls it. Raises UnusableError on every rank."""
    eval_lanes = max((evaluated_lanes(eval_config, index) for index in data.evaluated), default=0)
    num_lanes, parts = 2 * len(lanes_of(job.spec.train, world)) + eval_lanes, []
    if not fits_without_counting(job, world, num_lanes=num_lanes):
        with suppress(NotCountedError):  # then nobody knows what it needs
            parts = training_parts(job, eval_config, eval_lanes=eval_lanes)
    refuse_what_cannot_fit(parts, world.device, gather=gather_objects)

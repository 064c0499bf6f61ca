"""Summary of a configuration without starting a job: `dist-mem train CONFIG --check [--world N]`.

Sizes come from the model on torch's meta device, epochs from the index of the data if it is built. Letters: G lanes of
the whole job, T tokens of a segment, K segments of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dist_mem.block import ModelSpec, model_spec
from dist_mem.checkpoint.resume_source import check_data
from dist_mem.checkpoint.retention import unsaved_steps
from dist_mem.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    deepspeed_block,
)
from dist_mem.config.memory_blocks import is_per_block, memories_of
from dist_mem.data.batch_plan import batch_plan, idle_work, num_readable, steps_per_epoch, total_steps
from dist_mem.data.curriculum import Stage, answers_of, stages_of, training_splits
from dist_mem.data.directory import open_index, open_tokenizer, refresh
from dist_mem.data.lanes import training_plan
from dist_mem.data.mixture import (
    MixturePart,
    MixturePlan,
    describe_sources,
    mixture_parts,
    source_names,
    source_settings,
)
from dist_mem.data.plan import Plan
from dist_mem.data.remote.fetch import show
from dist_mem.engine.optimizer import parameter_groups
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import NotCountedError, flops_per_token
from dist_mem.estimate.vocabulary import data_is_built, vocab_size_of
from dist_mem.hf.folder import check_sizes
from dist_mem.hf.names import host_paths
from dist_mem.hf.vocabulary import compare_tokens
from dist_mem.model import MemoryLM, describe
from dist_mem.runtime.terminal import count_noun


def idle_warning(train: TrainConfig, data: DataConfig, world_sizes: Iterable[int]) -> str | None:
    """Return a warning for the first of these numbers of ranks that wastes more than IDLE_LIMIT; None if none does.

    Raises:
        UnusableError: the data has too few documents for the lanes.
    """
    try:
        num_documents = num_readable(built_plan(data, train))
    except ValueError as error:
        raise UnusableError(str(error)) from error
    for size in world_sizes:
        waste = idle_work(train, size, num_documents=num_documents)
        if waste and waste.label == "warning":
            return f"warning: with {count_noun(size, 'rank')}, {waste.text}"
    return None


def known_steps(data: DataConfig, train: TrainConfig, schedule: ScheduleConfig) -> int | None:
    """Return the updates of the whole training; None if its epochs have no length before the data are built.

    Raises:
        UnusableError: the data is damaged, or its epochs make no training.
    """
    if train.steps is not None:
        return train.steps
    try:
        plan = built_plan(data, train)
        return None if plan is None else total_steps(train, schedule, plan)
    except ValueError as error:
        raise UnusableError(str(error)) from error


def subjects(
    config: Config, *, world_size: int, resumed: tuple[Path, Mapping[str, Any]] | None = None
) -> list[tuple[str, str]]:
    """Return the summary as labels and texts.

    Args:
        resumed: the checkpoint that the job resumes from, and its manifest.

    Raises:
        UnusableError: the model cannot be built, or the data is damaged, has too few documents for the lanes, or is not
            that of the checkpoint.
    """
    try:
        evaluated = [config.eval.split] if config.eval.every else []
        refresh(config.data, evaluated if config.data.mixture else [config.data.train_split, *evaluated])
        parts: Sequence[MixturePart] = ()
        if resumed is not None and not _not_built(config.data):
            directory, manifest = resumed
            check_data(directory, manifest, training_splits(config.data, open_tokenizer(config.data)), config.data)
            parts = mixture_parts(manifest.get("mixture", ()), config.data, config.train, manifest["step"])
        plan = built_plan(config.data, config.train, parts)
        if plan is not None and config.eval.every is not None:
            open_index(config.data, config.eval.split)  # or refuse the split
        if plan is not None and config.data.until_accuracy is not None:
            for each in stages_of(config.data)[:-1]:
                answers_of(each, config.eval.split)  # likewise
        stage = (deepspeed_block(config).get("zero_optimization") or {}).get("stage", 0)
        batch = _batch_lines(config.train, config.optimizer, stage, world_size, num_readable(plan))
        data = _data_lines(config.data, config.train, config.schedule, plan)
        spec = model_spec(config, vocab_size_of(config.data, config.model))
        of_tokens = list(_token_lines(config.data, config.model, spec.vocab_size))
        run = ("run", f"{config.name}, in {config.run_dir}")
        of_model = _model_lines(spec, check_model(config), world_size, is_built=plan is not None)
        saved = [("saves", line) for line in unsaved_steps(config.checkpoint)]
        return [*of_tokens, run, *of_model, *batch, *data, *saved]
    except UnusableError:
        raise
    except ValueError as error:
        raise UnusableError(str(error)) from error


def _flops_text(spec: ModelSpec) -> str:
    try:
        scoring, training = (flops / 1e6 for flops in flops_per_token(spec))
    except NotCountedError as error:
        return f"not counted: {error}"
    counted = f"full memories, {spec.train.micro_batch_size} lanes per forward, products only"
    return f"{training:,.4g} M per predicted token in training, {scoring:,.4g} M in scoring; {counted}"


def _describe_memory(memory: Mapping[str, Any]) -> str:
    """Describe a memory with its options, and the memory under `over`; or the memory of every block."""
    if is_per_block(memory):
        return "; ".join(
            f"{key.partition('.')[2]}: {_describe_memory(each)}" for key, each in memories_of(memory).items()
        )
    options = ", ".join(
        f"{name} {value}" for name, value in memory.items() if value is not None and name not in ("kind", "over")
    )
    over = f" over {_describe_memory(memory['over'])}" if memory.get("over") else ""
    return f"{memory['kind']}{f' ({options})' if options else ''}{over}"


def check_model(config: Config, vocab_size: int | None = None) -> dict[str, int]:
    """Return `describe` of the configuration's model; `vocab_size` None: that of the data if it is built.

    Raises:
        UnusableError: the model, its memory or the groups of the optimizer cannot be built with these settings, or the
            memory has no place for pretrained attention.
    """
    spec = model_spec(config, vocab_size or vocab_size_of(config.data, config.model))
    try:
        if config.optimizer.groups or config.model.pretrained is not None:
            with torch.device("meta"):
                model = MemoryLM(spec)
            if config.model.pretrained is not None:
                _check_attention(model)
            parameter_groups(model, config.optimizer)
        return describe(spec)
    except (ValueError, RuntimeError) as error:  # RuntimeError: more bytes than a tensor can have
        raise UnusableError(str(error)) from error


def _check_attention(model: MemoryLM) -> None:
    try:
        host_paths(model)
    except ValueError as error:
        raise ValueError(f"model.pretrained: {error}") from error


def _token_lines(data: DataConfig, model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Compare the tokenizer of the data with that of pretrained weights."""
    if model.pretrained is not None:
        is_built = data_is_built(data)
        check_sizes(model, vocab_size if is_built else None)
        if is_built and (remark := compare_tokens(model, open_tokenizer(data))):
            yield "tokenizer", remark


def _model_lines(
    spec: ModelSpec, sizes: Mapping[str, int], world_size: int, *, is_built: bool
) -> Iterator[tuple[str, str]]:
    model, train = spec.model, spec.train
    assumed = "" if is_built else " (assumed: the data is not built yet)"
    per_rank = sizes["state_bytes_per_lane"] * batch_plan(train, world_size).lanes_per_rank
    layers, words = sizes["num_layer_parameters"], sizes["num_vocabulary_parameters"]
    state = f"{sizes['state_bytes_per_lane']:,} bytes per lane, {per_rank:,} bytes per rank"
    yield "model", f"{model.num_layers} layers of width {model.d_model}, {model.num_heads} heads, {model.norm}-norm"
    yield "parameters", f"{sizes['num_parameters']:,}: {layers:,} in the layers, {words:,} in the vocabulary"
    yield "flops", _flops_text(spec)
    yield "vocabulary", f"{spec.vocab_size:,}{assumed}"
    yield "memory", f"{_describe_memory(spec.memory)}: {state}"


def _batch_lines(
    train: TrainConfig, optimizer: OptimizerConfig, stage: int, world_size: int, num_documents: int | None
) -> Iterator[tuple[str, str]]:
    batch = batch_plan(train, world_size)
    places = batch.lanes_per_rank * world_size
    of_places = f" of {places:,}" if batch.idle_lanes else ""
    product = (
        f"{count_noun(world_size, 'rank')} x {count_noun(batch.groups, 'micro-batch')} x {train.micro_batch_size} lanes"
    )
    yield "lanes", f"{train.global_batch_size:,}{of_places} = {product}"
    if waste := idle_work(train, world_size, num_documents=num_documents):
        yield waste
    tokens = train.global_batch_size * train.seg_len * train.segments_per_update
    passes = count_noun(batch.backwards, "forward and backward", "forwards and backwards")
    segments = count_noun(train.segments_per_update, "segment")
    yield (
        "update",
        f"{train.global_batch_size} lanes x {segments} of {train.seg_len}: {tokens:,} tokens, {passes} per rank",
    )
    clipping = "no clipping" if train.max_grad_norm is None else f"clipped at norm {train.max_grad_norm:g}"
    yield "engine", f"ZeRO stage {stage}, {train.precision}, {optimizer.kind}, {clipping}"


def built_plan(data: DataConfig, train: TrainConfig, parts: Sequence[MixturePart] = ()) -> Plan | None:
    """Return the plan of the training split; None if the data is not built yet. `parts`: as for `training_plan`."""
    if _not_built(data):
        return None
    return training_plan(data, train, [open_index(one, data.train_split) for one in source_settings(data)], parts)


def _not_built(data: DataConfig) -> list[str]:
    """Return the paths that are not built yet, of data.path and of the sources of a mixture."""
    return [one.path for one in [data, *source_settings(data)] if not data_is_built(one)]


def _data_lines(
    data: DataConfig, train: TrainConfig, schedule: ScheduleConfig, plan: Plan | None
) -> Iterator[tuple[str, str]]:
    if plan is None:
        given, other = (train.steps, "epochs") if train.steps is not None else (train.epochs, "steps")
        yield "data", f"{', '.join(dict.fromkeys(_not_built(data)))}: not built yet"
        yield "training", f"{given:,} {'steps' if other == 'epochs' else 'epochs'}; {other} follow from the data"
        return
    splits = training_splits(data, open_tokenizer(data))
    stages, until = stages_of(data), total_steps(train, schedule, plan)
    if isinstance(plan, MixturePlan):
        yield from (("data", line) for line in describe_sources(plan, source_names(data), until))
        yield "training", f"{until:,} steps = {until / steps_per_epoch(train, plan):.3g} epochs of all sources"
        return
    for stage, index in zip(stages[:-1], splits, strict=False):
        try:
            yield from _stage_lines(stage, training_plan(data, train, [index]), train, stage.until or until)
        except ValueError as error:
            raise UnusableError(f"{stage.key} = {stage.data.path}: {error}") from error
    yield from _stage_lines(stages[-1], plan, train, until, is_only=len(stages) == 1)


def _stage_lines(
    stage: Stage, plan: Plan, train: TrainConfig, until: int, *, is_only: bool = False
) -> Iterator[tuple[str, str]]:
    data, steps = stage.data, until - stage.first
    num_tokens, per_epoch = int(plan.lengths.sum()), steps_per_epoch(train, plan)
    skipped = f", {count_noun(len(plan.skipped), 'document')} too short" if plan.skipped else ""
    padding = 1 - num_tokens / (plan.num_segments * train.seg_len)
    size = f"{count_noun(len(plan.lengths), 'document')}{skipped}, {num_tokens:,} tokens, padding {padding:.2%}"
    read = round(steps / per_epoch * num_tokens)
    may_end = stage.until is not None and data.until_accuracy is not None
    or_before = f", or to {data.until_accuracy:.1%} right answers" if may_end else ""
    when = "" if is_only else f"steps {stage.first + 1:,} to {until:,}{or_before}: "
    yield "data", f"{when}{show(data.path)}, {data.train_split}: {size}"
    yield "epoch", f"{per_epoch:,.1f} steps"
    yield "training", f"{steps:,} steps = {steps / per_epoch:.3g} epochs = {read:,} tokens"

"""Constraints on configuration values: choices, ranges, and checks across keys.

The tables list every key whose value is a number or one of a few words; a test compares them with the schema. check.py
has already checked types and unknown keys. Memories check their own options; DeepSpeed checks its own ranges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dist_mem.config.bounds import generic
from dist_mem.config.check import Problem, flatten, nearest, shown

CHOICES: dict[str, tuple[str, ...]] = {
    "data.layout": ("documents", "stream"),
    "data.cut": ("start", "end"),
    "data.on_corrupt": ("stop", "skip"),
    "model.kind": ("transformer", "gpt2"),
    "model.norm": ("pre", "post"),
    "train.precision": ("fp32", "bf16", "fp16"),
    "optimizer.kind": ("adamw", "adam", "sgd"),
    "schedule.kind": ("constant", "linear", "cosine"),
    "eval.layout": ("documents", "stream"),
    "eval.precision": ("fp32", "bf16", "fp16"),
    "divergence.action": ("stop", "skip", "rollback"),
    "data.stage": ("none", "node", "memory"),
    "tracking.send": ("auto", "always", "never"),
    "launch.restart": ("requeue", "resubmit", "chain", "none"),
    "launch.container": ("none", "apptainer", "pyxis"),
}


GPT2: dict[str, Any] = {  # values of `model` that model.kind gpt2 requires
    "norm": "pre",
    "final_norm": True,
    "tie_embeddings": True,
    "adaptive": None,
    "d_head": None,
    "d_embed": None,
    "clamp_len": None,
}


class Range(NamedTuple):
    """The range of a numeric key."""

    words: str  # for messages
    holds: Callable[[float], bool]  # whether a number is in the range


_COUNT = Range("at least 1", lambda value: value >= 1)
_NOT_NEGATIVE = Range("at least 0", lambda value: value >= 0)
_POSITIVE = Range("greater than 0", lambda value: value > 0)
_SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)

RANGES: dict[str, Range] = {
    "data.max_document_len": Range("at least 2", lambda value: value >= 2),  # one token has no target
    "data.seed": _NOT_NEGATIVE,
    "data.prefetch": _COUNT,
    "model.num_layers": _COUNT,
    "model.d_model": _COUNT,
    "model.num_heads": _COUNT,
    "model.d_head": _COUNT,
    "model.d_inner": _COUNT,
    "model.d_embed": _COUNT,
    "model.dropout": _SHARE,
    "model.attention_dropout": _SHARE,
    "model.adaptive.cutoffs[]": _COUNT,
    "model.adaptive.div_val": _COUNT,
    "model.num_positions": _COUNT,
    "model.token_types[].id": _NOT_NEGATIVE,
    "model.token_types[].after[]": _NOT_NEGATIVE,
    "model.clamp_len": _COUNT,
    "model.init_std": _POSITIVE,
    "train.seed": _NOT_NEGATIVE,
    "train.lanes": _COUNT,
    "train.micro_lanes": _COUNT,
    "train.seg_len": _COUNT,
    "train.segments_per_update": _COUNT,
    "train.steps": _COUNT,
    "train.epochs": _POSITIVE,
    "train.max_grad_norm": _POSITIVE,
    "train.threads": _COUNT,
    "optimizer.lr": _POSITIVE,
    "optimizer.betas[]": _SHARE,
    "optimizer.eps": _POSITIVE,
    "optimizer.momentum": _SHARE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.groups[].lr": _POSITIVE,
    "optimizer.groups[].weight_decay": _NOT_NEGATIVE,
    "schedule.warmup_steps": _NOT_NEGATIVE,
    "schedule.decay_steps": _COUNT,
    "schedule.end_factor": _NOT_NEGATIVE,
    "eval.every": _COUNT,
    "eval.lanes": _COUNT,
    "eval.seg_len": _COUNT,
    "eval.mem_len": _COUNT,
    "eval.clamp_len": _NOT_NEGATIVE,
    "eval.max_document_len": _COUNT,
    "checkpoint.every": _COUNT,
    "checkpoint.every_minutes": _POSITIVE,
    "checkpoint.keep_last": _COUNT,
    "checkpoint.keep_every": _COUNT,
    "checkpoint.keep_best": _COUNT,
    "divergence.spike_z": _POSITIVE,
    "divergence.window": Range("at least 8", lambda value: value >= 8),  # fewer losses give no reliable spread
    "divergence.max_times": _NOT_NEGATIVE,
    "tracking.every": _COUNT,
    "watchdog.join_seconds": _POSITIVE,
    "watchdog.seconds": _POSITIVE,
    "watchdog.straggler": Range("greater than 1", lambda value: value > 1),
    "launch.tasks_per_node": _COUNT,
    "launch.cpus_per_task": _COUNT,
    "launch.signal_seconds": _COUNT,
    "launch.chain": _COUNT,
    "launch.max_stalled": _COUNT,
}


def check_values(config: Mapping[str, Any], optional: set[str]) -> Iterator[Problem]:
    """Yield the values that are out of range or not among their choices.

    Args:
        config: resolved plain blocks whose types are correct.
        optional: keys that may be null, list items as `optimizer.groups[].lr`.
    """
    for key, value in flatten(config).items():
        general = generic(key)
        if general in CHOICES and value not in CHOICES[general]:
            choices = CHOICES[general]
            close = nearest(str(value), choices)
            meant = f"; did you mean {close}?" if close else ""
            yield Problem(key, f"is {shown(value)}, but must be one of {', '.join(choices)}{meant}")
        if general in RANGES and value is not None and not (math.isfinite(value) and RANGES[general].holds(value)):
            off = "; use null for none" if general in optional and value <= 0 else ""
            yield Problem(key, f"is {value!r}, but must be {RANGES[general].words}{off}")


def check_together(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield combinations of values that are invalid; `config` as in `check_values`, with every single value valid."""
    model, train, optimizer = config["model"], config["train"], config["optimizer"]
    if (train["steps"] is None) == (train["epochs"] is None):
        given = "neither is given" if train["steps"] is None else "both are given; set one of them to null"
        yield Problem("train.steps", f"give exactly one of train.steps and train.epochs: {given}")
    if train["micro_lanes"] > train["lanes"]:
        more = f"{train['micro_lanes']} is more than train.lanes = {train['lanes']}"
        yield Problem("train.micro_lanes", f"{more}; the surplus would never be used")
    if model["d_head"] is None and model["d_model"] % model["num_heads"]:
        uneven = f"{model['d_model']} is not a multiple of model.num_heads = {model['num_heads']}"
        yield Problem("model.d_model", f"{uneven}; change one of them or give model.d_head")
    if model["adaptive"] is not None:
        yield from _check_adaptive(model["adaptive"])
    yield from _check_gpt2(model, {"train": train["seg_len"], "eval": config["eval"]["seg_len"]})
    yield from _check_optimizer(optimizer)
    yield from _check_schedule(config["schedule"], train["steps"])
    yield from _check_checkpoint(config["checkpoint"], config["eval"]["every"])
    yield from _check_blocks(config["data"]["blocks"], train["seg_len"], config["eval"])
    if config["data"]["cut"] == "end" and config["data"]["layout"] == "stream":
        yield Problem("data.cut", "is end, but the lanes of data.layout = stream are not documents; set it to start")
    if config["data"]["train_split"] == "test":
        yield Problem("data.train_split", "is 'test'; training never opens the test split")
    seg_len = config["eval"]["seg_len"]
    if config["eval"]["every"] is not None and seg_len not in (None, train["seg_len"]):
        other = f"is {seg_len}, but memories are built for train.seg_len = {train['seg_len']} while training"
        yield Problem("eval.seg_len", f"{other}; set it to null, or eval.every to null and use `dist-mem evaluate`")
    if config["eval"]["split"] == "test" and config["eval"]["every"] is not None:
        yield Problem(
            "eval.split", "is 'test'; training never opens the test split, use `dist-mem evaluate --split test`"
        )


def _check_blocks(blocks: bool, seg_len: int, evaluation: Mapping[str, Any]) -> Iterator[Problem]:
    eval_blocks = blocks if evaluation["blocks"] is None else evaluation["blocks"]
    empty = "segments of one token, and the first token of a block is not a target: nothing would be scored; set"
    if blocks and seg_len == 1:
        yield Problem("data.blocks", f"is true with {empty} train.seg_len to 2 or more, or data.blocks=false")
    elif eval_blocks and (evaluation["seg_len"] or seg_len) == 1:
        yield Problem("eval.blocks", f"is in effect true with {empty} eval.seg_len to 2 or more, or eval.blocks=false")


def _check_gpt2(model: Mapping[str, Any], seg_lens: Mapping[str, int | None]) -> Iterator[Problem]:
    if model["kind"] != "gpt2":
        if model["pretrained"] is not None:
            yield Problem("model.pretrained", "needs model.kind=gpt2; set that, or leave model.pretrained out")
        if model["token_types"]:
            yield Problem("model.token_types", "needs model.kind=gpt2; set that, or leave model.token_types out")
        return
    for index, token_type in enumerate(model["token_types"]):
        if bool(token_type["after"]) != (index > 0):
            must = "must list the tokens that start this type" if index else "must be empty: a document starts with it"
            yield Problem(f"model.token_types[{index}].after", f"is {token_type['after']}, but {must}")
    for key, value in GPT2.items():
        if model[key] != value:
            yield Problem(f"model.{key}", f"is {model[key]!r}, but in GPT-2 it is {value!r}; leave it out")
    for block, seg_len in seg_lens.items():
        if seg_len is not None and seg_len > model["num_positions"]:
            more = f"is {seg_len}, more than model.num_positions = {model['num_positions']}"
            yield Problem(f"{block}.seg_len", f"{more}: a segment's tokens have learned positions")


def _check_adaptive(adaptive: Mapping[str, Any]) -> Iterator[Problem]:
    cutoffs, ties = adaptive["cutoffs"], adaptive["tie_projections"]
    if not cutoffs or cutoffs != sorted(set(cutoffs)):
        yield Problem("model.adaptive.cutoffs", f"is {cutoffs}, but must be one or more increasing numbers of tokens")
    if ties is not None and len(ties) != len(cutoffs) + 1:
        yield Problem(
            "model.adaptive.tie_projections", f"has {len(ties)} flags for {len(cutoffs) + 1} bins; give one per bin"
        )


def _check_optimizer(optimizer: Mapping[str, Any]) -> Iterator[Problem]:
    if len(optimizer["betas"]) != 2:
        yield Problem("optimizer.betas", f"is {optimizer['betas']}, but must be two numbers")
    if optimizer["momentum"] and optimizer["kind"] != "sgd":
        yield Problem(
            "optimizer.momentum", f"is not used by {optimizer['kind']}; set optimizer.kind=sgd, or momentum to 0"
        )
    for index, group in enumerate(optimizer["groups"]):
        if message := _pattern_error(group["match"]):
            yield Problem(f"optimizer.groups[{index}].match", message)


def _pattern_error(pattern: str) -> str | None:
    if not pattern:
        return "is empty and would match every parameter; give a regular expression, or .* if that is intended"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is {shown(pattern)}, but must be a regular expression: {error}"
    return None


def _check_checkpoint(checkpoint: Mapping[str, Any], eval_every: int | None) -> Iterator[Problem]:
    for key in ("keep_every", "keep_best"):
        if checkpoint[key] is not None and checkpoint["keep_last"] is None:
            yield Problem(f"checkpoint.{key}", "has no effect while all checkpoints are kept; set checkpoint.keep_last")
    if checkpoint["keep_best"] is not None and eval_every is None:
        yield Problem("checkpoint.keep_best", "needs a validation loss; set eval.every")


def _check_schedule(schedule: Mapping[str, Any], steps: int | None) -> Iterator[Problem]:
    if steps is not None and schedule["warmup_steps"] > steps:
        yield Problem("schedule.warmup_steps", f"{schedule['warmup_steps']} is more than train.steps = {steps}")

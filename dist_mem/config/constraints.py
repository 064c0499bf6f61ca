"""Checks across configuration keys: combinations of valid values that are invalid together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_mem.config.check import Problem, format_value
from dist_mem.config.memory_blocks import DEFAULT, is_per_block, memories_of
from dist_mem.config.schema import BY_SEGMENTS, ROPE_KINDS, RopeConfig

# Values of `model` that a published kind requires.
_BOTH: dict[str, Any] = {"norm": "pre", "final_norm": True, "adaptive": None, "d_embed": None, "clamp_len": None}
PUBLISHED: dict[str, dict[str, Any]] = {"gpt2": {**_BOTH, "tie_embeddings": True, "d_head": None}, "llama": _BOTH}
_NAMES = {"gpt2": "GPT-2", "llama": "a Llama"}
LLAMA_KEYS: dict[str, Any] = {
    **{"num_kv_heads": None, "rope_theta": 10_000.0, "rope": None, "norm_eps": 1e-5},
    **{"qkv_bias": False, "qk_norm": False, "sliding_window": None},
}


def check_together(config: Mapping[str, Any], *, trains: bool = True) -> Iterator[Problem]:
    """Yield the invalid combinations in a plain resolved configuration whose single values are all valid.

    Args:
        trains: the configuration must say how long the training is, and have lanes for its micro-batches.
    """
    model, train, optimizer = config["model"], config["train"], config["optimizer"]
    if trains and (train["steps"] is None) == (train["epochs"] is None):
        given = "neither is given" if train["steps"] is None else "both are given; set one of them to null"
        yield Problem("train.steps", f"give exactly one of train.steps and train.epochs: {given}")
    if trains and train["micro_batch_size"] > train["global_batch_size"]:
        more = f"{train['micro_batch_size']} is more than train.global_batch_size = {train['global_batch_size']}"
        yield Problem("train.micro_batch_size", f"{more}; the surplus would never be used")
    if train["segments_per_update"] % train["bptt_segments"]:
        uneven = f"is {train['bptt_segments']}, which does not divide train.segments_per_update"
        yield Problem("train.bptt_segments", f"{uneven} = {train['segments_per_update']}; change one of them")
    if (recomputed := train["activation_checkpointing"]) in BY_SEGMENTS and train["bptt_segments"] == 1:
        alone = f"is {recomputed}, but a window is one segment: set train.bptt_segments, or {BY_SEGMENTS[recomputed]}"
        yield Problem("train.activation_checkpointing", alone)
    if train["reset_steps"] is not None and train["reset"] == "never":
        yield Problem("train.reset_steps", "needs train.reset=segment or window; set that, or this to null")
    if train["reset"] != "never" and model["token_types"]:
        yield Problem("train.reset", f"is {train['reset']}, which would also reset model.token_types: set it to never")
    if text := profile_problem(train["profile"], train["steps"]):
        yield Problem("train.profile", text)
    if model["d_head"] is None and model["d_model"] % model["num_heads"]:
        uneven = f"{model['d_model']} is not a multiple of model.num_heads = {model['num_heads']}"
        yield Problem("model.d_model", f"{uneven}; change one of them or give model.d_head")
    if train["tf32"] and train["precision"] != "fp32":
        other = f"is true, but train.precision is {train['precision']}, where only memories and sums compute in fp32"
        yield Problem("train.tf32", f"{other}, exactly; set it to false, or train.precision to fp32")
    stage = (config["deepspeed"].get("zero_optimization") or {}).get("stage", 0)
    if train["precision"] == "fp16" and stage == 0:
        reason = "without ZeRO DeepSpeed divides gradients by a loss scale with which it has not multiplied the loss"
        yield Problem("train.precision", f"is fp16, but {reason}; set deepspeed.zero_optimization.stage=1")
    if model["adaptive"] is not None:
        yield from _check_adaptive(model["adaptive"])
    yield from _check_memory(config["memory"], model["num_layers"])
    yield from _check_kind(model, {"train": train["seg_len"], "eval": config["eval"]["seg_len"]})
    yield from _check_optimizer(optimizer, model["kind"])
    yield from _check_lora(model, optimizer["groups"])
    yield from _check_decay(config["schedule"])
    if train["steps"] is not None:
        yield from check_schedule(config["schedule"], train["steps"], f"train.steps = {train['steps']}")
    yield from _check_checkpoint(config["checkpoint"], config["eval"]["every"])
    yield from _check_blocks(config["data"]["blocks"], train["seg_len"], config["eval"])
    yield from _check_curriculum(config["data"]["curriculum"], train["steps"])
    yield from _check_until_accuracy(config["data"], config["eval"]["every"])
    yield from _check_mixture(config["data"], train["epochs"])
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


def _check_memory(memory: Mapping[str, Any], num_layers: int) -> Iterator[Problem]:
    for key in memories_of(memory) if is_per_block(memory) else ():
        name = key.partition(".")[2]
        if name != DEFAULT and int(name) >= num_layers:
            last = f"block {num_layers - 1} is the last: remove it, or raise model.num_layers"
            yield Problem(key, f"is of no block, {last}")


def profile_problem(steps: Sequence[int] | None, total_steps: int | None) -> str | None:
    """Return why these steps cannot be profiled in a run of so many steps (None: not known yet); None if they can."""
    if steps is None:
        return None
    if len(steps) != 2 or steps[0] >= steps[1]:
        return f"is {list(steps)}, but must be two steps, the first less than the last, as [10, 15]"
    if total_steps is not None and steps[1] > total_steps:
        return f"is {list(steps)}, but the run ends at step {total_steps:,}; give earlier steps"
    return None


def _check_blocks(blocks: bool, seg_len: int, evaluation: Mapping[str, Any]) -> Iterator[Problem]:
    eval_blocks = blocks if evaluation["blocks"] is None else evaluation["blocks"]
    empty = "segments of one token, and the first token of a block is not a target: nothing would be scored; set"
    if blocks and seg_len == 1:
        yield Problem("data.blocks", f"is true with {empty} train.seg_len to 2 or more, or data.blocks=false")
    elif eval_blocks and (evaluation["seg_len"] or seg_len) == 1:
        yield Problem("eval.blocks", f"is in effect true with {empty} eval.seg_len to 2 or more, or eval.blocks=false")


def _check_curriculum(stages: Sequence[Mapping[str, Any]], steps: int | None) -> Iterator[Problem]:
    before = 0
    for index, stage in enumerate(stages):
        key, until = f"data.curriculum[{index}]", stage["until"]
        yield from _check_directory(f"{key}.path", stage["path"])
        if until <= before:
            yield Problem(f"{key}.until", f"is {until}, but the stage before ends at step {before}; give a later step")
        before = until
    if stages and steps is None:
        yield Problem("data.curriculum", "counts steps, but train.epochs is given; give train.steps in its place")
    elif steps is not None and before >= steps:
        ends = f"is {before}, but the run ends at step {steps}, and data.path would not be read"
        yield Problem(f"data.curriculum[{len(stages) - 1}].until", f"{ends}; set train.steps higher, or this lower")


def _check_directory(key: str, path: str) -> Iterator[Problem]:
    if not path.strip():
        yield Problem(key, "is empty; give a data directory")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        yield Problem(key, "is no directory: copy the data to a disk, as only data.path may be elsewhere")


def _check_mixture(data: Mapping[str, Any], epochs: float | None) -> Iterator[Problem]:
    sources, key = data["mixture"], "data.mixture"
    if not sources:
        return
    for index, source in enumerate(sources):
        yield from _check_directory(f"{key}[{index}].path", source["path"])
        if os.path.normpath(source["path"]) in [os.path.normpath(other["path"]) for other in sources[:index]]:
            twice = f"is {format_value(source['path'])}, as of an earlier source: give each directory once"
            yield Problem(f"{key}[{index}].path", twice)
    if not any(source["weight"] > 0 for source in sources):
        yield Problem(key, "has no weight above 0, so nothing would be read; give one")
    if data["curriculum"]:
        yield Problem(key, "is given beside data.curriculum; give one of them")
    if data["layout"] == "stream":
        yield Problem(key, "is made of whole documents, but data.layout is stream; set that to documents")
    if epochs is not None:
        yield Problem(key, "has no epochs of its own, but train.epochs is given; give train.steps in its place")


def _check_until_accuracy(data: Mapping[str, Any], eval_every: int | None) -> Iterator[Problem]:
    key, wanted, stages = "data.until_accuracy", data["until_accuracy"], data["curriculum"]
    if wanted is None:
        return
    if not stages:
        yield Problem(key, f"is {wanted}, but no stage could end by it: give data.curriculum, or set it to null")
    elif eval_every is None:
        yield Problem(key, f"is {wanted}, but nothing is evaluated during training: set eval.every, or this to null")
    elif eval_every >= stages[-1]["until"]:
        last = f"the last stage of data.curriculum ends at step {stages[-1]['until']}"
        yield Problem(key, f"is {wanted}, but eval.every is {eval_every}, and {last}: set eval.every lower")


def _check_kind(model: Mapping[str, Any], seg_lens: Mapping[str, int | None]) -> Iterator[Problem]:
    kind = model["kind"]
    if model["token_types"] and kind != "gpt2":
        yield Problem("model.token_types", "needs model.kind=gpt2; set that, or leave model.token_types out")
    if model["pretrained"] is not None and kind not in PUBLISHED:
        yield Problem("model.pretrained", "needs model.kind=gpt2 or llama; set that, or leave model.pretrained out")
    for index, token_type in enumerate(model["token_types"]):
        if bool(token_type["after"]) != (index > 0):
            must = "must list the tokens that start this type" if index else "must be empty: a document starts with it"
            yield Problem(f"model.token_types[{index}].after", f"is {token_type['after']}, but {must}")
    for key, value in PUBLISHED.get(kind, {}).items():
        if model[key] != value:
            yield Problem(f"model.{key}", f"is {model[key]!r}, but in {_NAMES[kind]} it is {value!r}; leave it out")
    for block, seg_len in seg_lens.items():
        if kind in PUBLISHED and seg_len is not None and seg_len > model["num_positions"]:
            more = f"is {seg_len}, more than model.num_positions = {model['num_positions']}"
            fix = "a segment's tokens have learned positions" if kind == "gpt2" else "set that to the longest text"
            yield Problem(f"{block}.seg_len", f"{more}: {fix}")
    yield from _check_llama(model)


def _check_lora(model: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    if model["lora"] is None:
        return
    if model["kind"] not in PUBLISHED:
        yield Problem(
            "model.lora", "needs model.kind=gpt2 or llama; set that, or leave model.lora and its optimizer.groups out"
        )
    elif not model["lora"]["attention"] and not model["lora"]["feed_forward"]:
        yield Problem("model.lora", "adapts no weights: set attention or feed_forward to true, or model.lora to null")
    elif all(group["trainable"] for group in groups):
        yield Problem(
            "model.lora",
            "is set, but all other weights are trained too: add configs/pretrained/lora.yaml, or its groups with "
            "trainable: false, to optimizer.groups",
        )


def _check_llama(model: Mapping[str, Any]) -> Iterator[Problem]:
    if model["kind"] != "llama":
        for key, value in LLAMA_KEYS.items():
            if model[key] != value:
                yield Problem(f"model.{key}", f"is {model[key]!r}, which needs model.kind=llama; leave it out")
        return
    num_heads, num_kv_heads = model["num_heads"], model["num_kv_heads"]
    if num_kv_heads is not None and num_heads % num_kv_heads:
        shared = f"is {num_kv_heads}, but model.num_heads = {num_heads} is no multiple of it; change one of them"
        yield Problem("model.num_kv_heads", shared)
    d_head = model["d_head"] or model["d_model"] // num_heads
    if d_head % 2:
        yield Problem("model.d_head", f"is {d_head}, but rotary positions turn pairs: give an even model.d_head")
    if model["qk_norm"] and model["qkv_bias"]:
        both = "is True, as in Qwen3, and model.qkv_bias too, as in Qwen2: no model of transformers has both"
        yield Problem("model.qk_norm", f"{both}; set one of them to false")
    if model["rope"] is not None:
        yield from _check_rope(model["rope"], d_head=d_head, theta=model["rope_theta"])


def _check_rope(rope: Mapping[str, Any], *, d_head: int, theta: float) -> Iterator[Problem]:
    kind = rope["kind"]
    if kind is None:
        yield Problem("model.rope.kind", f"is None; give one of {', '.join(ROPE_KINDS)}, or set model.rope to null")
        return
    if rope["factor"] is None:
        yield Problem("model.rope.factor", f"is None, but model.rope.kind = {kind} needs a number; give it")
    for name, value in rope.items():
        if name not in ("kind", "factor", *ROPE_KINDS[kind]) and value != getattr(RopeConfig, name):
            yield Problem(f"model.rope.{name}", f"is {value!r}, but {kind} does not read it; leave it out")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if kind == "llama3" and high <= low:
        yield Problem("model.rope.high_freq_factor", f"is {high}, but must be more than low_freq_factor = {low}")
    if kind == "dynamic" and d_head == 2:
        yield Problem("model.rope.kind", "is dynamic, which has no formula for heads of 2 numbers; widen model.d_head")
    if kind == "yarn" and theta <= 1:
        yield Problem("model.rope_theta", f"is {theta}, but yarn divides by its logarithm: give more than 1")


def _check_adaptive(adaptive: Mapping[str, Any]) -> Iterator[Problem]:
    cutoffs, ties = adaptive["cutoffs"], adaptive["tie_projections"]
    if not cutoffs or cutoffs != sorted(set(cutoffs)):
        yield Problem("model.adaptive.cutoffs", f"is {cutoffs}, but must be one or more increasing numbers of tokens")
    if ties is not None and len(ties) != len(cutoffs) + 1:
        yield Problem(
            "model.adaptive.tie_projections", f"has {len(ties)} flags for {len(cutoffs) + 1} bins; give one per bin"
        )


def _check_optimizer(optimizer: Mapping[str, Any], model_kind: str) -> Iterator[Problem]:
    if len(optimizer["betas"]) != 2:
        yield Problem("optimizer.betas", f"is {optimizer['betas']}, but must be two numbers")
    if optimizer["momentum"] and optimizer["kind"] != "sgd":
        yield Problem(
            "optimizer.momentum", f"is not used by {optimizer['kind']}; set optimizer.kind=sgd, or momentum to 0"
        )
    if optimizer["muon"] is not None and optimizer["kind"] != "muon":
        yield Problem("optimizer.muon", f"is not used by {optimizer['kind']}; set optimizer.kind=muon, or leave it out")
    for index, group in enumerate(optimizer["groups"]):
        if group["rule"] is not None and optimizer["kind"] != "muon":
            rule = f"is {group['rule']}, but optimizer.kind is {optimizer['kind']}; set that to muon, or leave it out"
            yield Problem(f"optimizer.groups[{index}].rule", rule)
        if group["pretrained"] is not None and model_kind not in PUBLISHED:
            yield Problem(
                f"optimizer.groups[{index}].pretrained",
                f"is given, but model.kind is {model_kind}, of which no model is published: leave it out, or set that "
                f"to {' or '.join(PUBLISHED)}",
            )
        is_empty = group["param_regex"] == "" and group["pretrained"] is not None
        if not is_empty and (message := _pattern_error(group["param_regex"])):
            yield Problem(f"optimizer.groups[{index}].param_regex", message)


def _pattern_error(pattern: str) -> str | None:
    if not pattern:
        return "is empty and would match every parameter; give a regular expression, or .* if that is intended"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is {format_value(pattern)}, but must be a regular expression: {error}"
    return None


def _check_checkpoint(checkpoint: Mapping[str, Any], eval_every: int | None) -> Iterator[Problem]:
    for key in ("keep_every", "keep_best"):
        if checkpoint[key] is not None and checkpoint["keep_last"] is None:
            yield Problem(f"checkpoint.{key}", "has no effect while all checkpoints are kept; set checkpoint.keep_last")
    if checkpoint["keep_best"] is not None and eval_every is None:
        yield Problem("checkpoint.keep_best", "needs a validation loss; set eval.every")


def wsd_decay_steps(schedule: Mapping[str, Any], steps: int) -> int:
    """Return the number of the last steps in which lr decays, with `wsd`, in a run of so many steps."""
    if schedule["decay_steps"] is not None:
        return int(schedule["decay_steps"])
    return round(steps * (0.2 if schedule["decay_share"] is None else schedule["decay_share"]))


def check_schedule(schedule: Mapping[str, Any], steps: int, end: str) -> Iterator[Problem]:
    """Yield a warmup, or with `wsd` a decay, that has no room in so many steps; `end` says where they come from."""
    warmup_steps = schedule["warmup_steps"]
    if warmup_steps > steps:
        yield Problem("schedule.warmup_steps", f"{warmup_steps} is more than {end}")
    elif schedule["kind"] == "wsd" and warmup_steps + (decay_steps := wsd_decay_steps(schedule, steps)) > steps:
        after = f"after schedule.warmup_steps = {warmup_steps} is more than {end}"
        if schedule["decay_steps"] is not None:
            yield Problem("schedule.decay_steps", f"{decay_steps} {after}")
        else:
            given = "null, which is 0.2" if schedule["decay_share"] is None else schedule["decay_share"]
            yield Problem("schedule.decay_share", f"is {given}: a decay of {decay_steps} steps {after}")


def _check_decay(schedule: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("decay_share", "decay_shape"):
        if schedule[name] is not None and schedule["kind"] != "wsd":
            other = f"is not used by {schedule['kind']}; set schedule.kind=wsd, or leave it out"
            yield Problem(f"schedule.{name}", other)
    if schedule["decay_share"] is not None and schedule["decay_steps"] is not None:
        yield Problem("schedule.decay_share", "is given beside schedule.decay_steps; set one of them to null")

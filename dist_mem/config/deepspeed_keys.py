"""The `deepspeed:` block: the top-level keys of DeepSpeed 0.19.8, and which ones dist_mem sets, refuses or passes on.

DeepSpeed ignores misspelled keys at the top level and in a few blocks, so this module checks them, without importing
DeepSpeed; a test compares these tables with the installed version. DeepSpeed's own models check the other blocks
(`engine/start.py:check_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_mem.config.check import Problem, check_tree, format_value, is_interpolation, join
from dist_mem.config.keys import ALLOWED, FREE


def _types_of(kind: type, names: str) -> dict[str, Any]:
    """Return names -> their type."""
    return dict.fromkeys(names.split(), kind)


# Keys passed on to DeepSpeed, with their types. DeepSpeed has models of the blocks whose type is `dict`.
HANDED_ON: dict[str, Any] = {
    **_types_of(dict, "zero_optimization bf16 fp16 comms_logger tensorboard csv_monitor wandb comet"),
    **_types_of(str, "communication_data_type log_level"),
    **_types_of(bool, "disable_allgather wall_clock_breakdown memory_breakdown dump_state disable_python_gc"),
    "data_types": {**_types_of(str, "grad_accum_dtype buffer_dtype"), **_types_of(list, "keep_in_fp32_modules")},
    "aio": {
        **_types_of(int, "block_size queue_depth intra_op_parallelism"),
        **_types_of(bool, "single_submit overlap_events use_gds"),
    },
    "flops_profiler": {
        **_types_of(bool, "enabled detailed"),
        **_types_of(float, "recompute_fwd_factor"),
        **_types_of(int, "profile_step module_depth top_modules"),
        **_types_of(str, "output_file"),
    },
}

PATHS = ("nvme_path", "output_path", "output_file")  # last parts of the keys that are paths

# Keys that dist_mem sets, and what to write instead. "auto" is accepted for them.
_PRECISION = "set train.precision"
_FINITE = "leave it out; without it DeepSpeed applies gradients that are not finite"
_BATCH = (
    "set train.global_batch_size and train.micro_batch_size; accumulation follows from them and the number of ranks"
)
OWNED: dict[str, str] = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": "set train.micro_batch_size",
    "gradient_accumulation_steps": _BATCH,
    "managed_gradient_accumulation": _BATCH,
    "gradient_clipping": "set train.max_grad_norm (null: no clipping)",
    "gradient_allreduce_op": "leave it out; the loss is divided by the scored tokens of all ranks",
    "optimizer": "set optimizer.kind, optimizer.lr and the other keys of optimizer",
    "scheduler": "set schedule.kind and the other keys of schedule",
    "zero_allow_untested_optimizer": "leave it out",
    "zero_force_ds_cpu_optimizer": "leave it out",
    "zero_optimization.compute_grad_norm": _FINITE,
    "bf16.enabled": _PRECISION,
    "bf16.check_grad_overflow": _FINITE,
    "bfloat16": _PRECISION,
    "fp16.enabled": _PRECISION,
    "torch_autocast": f"{_PRECISION}; autocast would change the memory's dtype between segments",
    "data_types.param_dtype": _PRECISION,
    "activation_checkpointing": "set train.activation_checkpointing; DeepSpeed's loses the structure of the memory",
    "compile": "set train.compile; DeepSpeed's takes effect only by a call for the whole model as one graph",
    "checkpoint": "set checkpoint.every; dist_mem commits and verifies checkpoints itself",
    "steps_per_print": "set tracking.every",
    "timers": "leave it out; it makes the host wait for the device, and tokens_per_second is logged anyway",
}

# Keys of DeepSpeed that dist_mem does not support.
_OWN_DATA = "dist_mem reads the data itself: see data.* and train.*"
_FP32 = "the optimizer keeps fp32, whatever train.precision is"
_DIVIDED = "the loss is divided by the scored tokens of all ranks already"
_ONE_AXIS = "lanes are the only axis that dist_mem divides among ranks"
UNSUPPORTED: dict[str, str] = {
    "autotuning": "it starts other jobs",
    "bf16.bf16_master_weights_and_grads": _FP32,
    "bf16.bf16_optimizer_states": _FP32,
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "datastates_ckpt": "dist_mem commits and verifies checkpoints itself",
    "expert_parallel": _ONE_AXIS,
    "fp16.fp16_master_weights_and_grads": _FP32,
    "gradient_predivide_factor": _DIVIDED,
    "hybrid_engine": "it is for reinforcement learning",
    "pipeline": _ONE_AXIS,
    "prescale_gradients": _DIVIDED,
    "seq_parallel_communication_data_type": _ONE_AXIS,
    "sequence_parallel_size": _ONE_AXIS,
    "tensor_parallel": _ONE_AXIS,
    "use_data_before_expert_parallelism": _ONE_AXIS,
    "vocabulary_size": "it only warns; the vocabulary is the tokenizer's",
    "weight_quantization": "it is for inference",
    "zero_optimization.round_robin_gradients": "DeepSpeed would assemble the weights of such a checkpoint incorrectly",
}

# The parts that affect results, and whether they may change on resume; all others affect speed, and may.
OF_RESULT = {"fp16": ALLOWED, "bf16": ALLOWED, "data_types": ALLOWED, "communication_data_type": FREE}
REFUSED = {**OWNED, **UNSUPPORTED}


def _known_keys() -> dict[str, Any]:
    """Return all keys, refused ones included, so that their typos are recognized too."""
    known = {name: dict(kind) if isinstance(kind, dict) else kind for name, kind in HANDED_ON.items()}
    for key in REFUSED:
        block, _, name = key.rpartition(".")
        if not block or isinstance(known[block], dict):
            (known[block] if block else known)[name] = object
    return known


SCHEMA = _known_keys()


def _allow_none(schema: Any) -> Any:
    return {name: _allow_none(kind) for name, kind in schema.items()} if isinstance(schema, dict) else schema | None


NULLABLE = _allow_none(SCHEMA)  # the types by which texts are read: null leaves any key to DeepSpeed


def _is_default(value: Any) -> bool:
    """Return whether a value is "auto" or null, which leaves the key to DeepSpeed or dist_mem."""
    return value is None or (isinstance(value, str) and value == "auto")


def without_defaults(tree: Any) -> Any:
    """Return the block without "auto" and null values, and without blocks that this leaves empty."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {name: without_defaults(child) for name, child in tree.items() if not _is_default(child)}
    return {name: child for name, child in kept.items() if child != {} or tree[name] == {}}


def _make_whole(tree: Any) -> Any:
    """Return the tree with whole floats such as 5e8 as integers; DeepSpeed accepts them as integers, dist_mem not."""
    if isinstance(tree, Mapping):
        return {name: _make_whole(child) for name, child in tree.items()}
    return int(tree) if isinstance(tree, float) and tree.is_integer() else tree


def _find(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def check_block(block: Mapping[str, Any], *, key: str, everywhere: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of a `deepspeed:` block at `key`; values with interpolations are not checked."""

    def is_open(value: Any) -> bool:
        return _is_default(value) or is_interpolation(value)

    kept = without_defaults(block)
    for name, reason in REFUSED.items():
        if _find(kept, name) not in (None, {}):
            yield Problem(join(key, name), f"{'is set by dist_mem' if name in OWNED else 'is refused'}: {reason}")
    yield from check_tree(SCHEMA, _make_whole(block), key=key, everywhere=everywhere, is_open=is_open)
    stage = _make_whole(_find(kept, "zero_optimization.stage"))  # read before DeepSpeed is loaded
    if not is_open(stage) and (type(stage) is not int or stage not in range(4)):
        yield Problem(join(key, "zero_optimization.stage"), f"is {format_value(stage)}, but must be 0, 1, 2 or 3")

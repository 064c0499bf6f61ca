"""The `deepspeed:` block: every key of DeepSpeed 0.19.8, and whether dist_mem sets it, refuses it or passes it on.

DeepSpeed ignores misspelled top-level keys, so this module checks them, without importing DeepSpeed; a test compares
these tables with the installed version. It also checks types; DeepSpeed checks ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_mem.config.check import Problem, check_tree, is_interpolation, join

_OFFLOAD = {"device": str, "nvme_path": str, "buffer_count": int, "pin_memory": bool}
_CSV_LIKE = {"enabled": bool, "output_path": str, "job_name": str}
_ZERO: dict[str, Any] = {
    "stage": int,
    "contiguous_gradients": bool,
    "reduce_scatter": bool,
    "reduce_bucket_size": int,
    "use_multi_rank_bucket_allreduce": bool,
    "allgather_partitions": bool,
    "allgather_bucket_size": int,
    "overlap_comm": bool,
    "load_from_fp32_weights": bool,
    "elastic_checkpoint": bool,
    "offload_param": {**_OFFLOAD, "buffer_size": int, "max_in_cpu": int},
    "offload_optimizer": {
        **_OFFLOAD,
        "pipeline_read": bool,
        "pipeline_write": bool,
        "fast_init": bool,
        "ratio": float,
        "super_offload": bool,
        "cpuadam_cores_perc": float,
    },
    "zenflow": {
        "topk_ratio": float,
        "select_strategy": str,
        "select_interval": object,
        "update_interval": object,
        "overlap_step": bool,
        "offload": bool,
        "auto_ratio": float,
        "full_warm_up_rounds": int,
        "pt_reserved_cores_perc": float,
        "steps_per_epoch": int,
    },
    "sub_group_size": int,
    "cpu_offload_param": bool,
    "cpu_offload_use_pin_memory": bool,
    "cpu_offload": bool,
    "stage3_gather_fp16_weights_on_model_save": bool,
    "ignore_unused_parameters": bool,
    "legacy_stage1": bool,
    "parameter_alignment": bool,
    "zero_hpz_partition_size": int,
    "zero_quantized_weights": bool,
    "zero_quantized_nontrainable_weights": bool,
    "zero_quantized_gradients": bool,
    "memory_efficient_linear": bool,
    "pipeline_loading_checkpoint": bool,
    "override_module_apply": bool,
    "log_trace_cache_warnings": bool,
    "enable_sanity_checks": bool,
    "save_muon_momentum_buffer_in_memory": bool,
    "leaf_module": {"classes": list, "names": list, "name_suffixes": list},
}
_STAGE3: dict[str, Any] = {  # accepted with and without the prefix `stage3_`
    "prefetch_bucket_size": int,
    "param_persistence_threshold": int,
    "model_persistence_threshold": int,
    "max_live_parameters": int,
    "max_reuse_distance": int,
    "gather_16bit_weights_on_model_save": bool,
    "module_granularity_threshold": int,
    "use_all_reduce_for_fetch_params": bool,
    "allgather_sequential": bool,
}

# Keys passed on to DeepSpeed, with their types.
HANDED_ON: dict[str, Any] = {
    "zero_optimization": {**_ZERO, **_STAGE3, **{f"stage3_{name}": kind for name, kind in _STAGE3.items()}},
    "bf16": {
        "immediate_grad_update": bool,
        "bf16_master_weights_and_grads": bool,
        "bf16_optimizer_states": bool,
    },
    "fp16": {
        "auto_cast": bool,
        "loss_scale": float,
        "initial_scale_power": int,
        "loss_scale_window": int,
        "hysteresis": int,
        "consecutive_hysteresis": bool,
        "min_loss_scale": int,
        "fp16_master_weights_and_grads": bool,
    },
    "communication_data_type": str,
    "prescale_gradients": bool,
    "gradient_predivide_factor": float,
    "disable_allgather": bool,
    "data_types": {"grad_accum_dtype": str, "buffer_dtype": str, "keep_in_fp32_modules": list},
    "aio": {
        "block_size": int,
        "queue_depth": int,
        "intra_op_parallelism": int,
        "single_submit": bool,
        "overlap_events": bool,
        "use_gds": bool,
    },
    "compile": {
        "deepcompile": bool,
        "autoep_non_moe": bool,
        "free_activation": bool,
        "free_activation_threshold": int,
        "offload_activation": bool,
        "offload_activation_pin_memory": bool,
        "offload_opt_states": bool,
        "double_buffer": bool,
        "symmetric_memory": bool,
        "debug_log": bool,
        "offload_parameters": bool,
        "sync_before_reduce": bool,
        "sync_after_reduce": bool,
        "sync_before_allgather": bool,
        "sync_after_allgather": bool,
        "keep_int_input_tensors": bool,
        "keep_all_input_tensors": bool,
        "passes": list,
    },
    "comms_logger": {"enabled": bool, "prof_all": bool, "prof_ops": list, "verbose": bool, "debug": bool},
    "flops_profiler": {
        "enabled": bool,
        "recompute_fwd_factor": float,
        "profile_step": int,
        "module_depth": int,
        "top_modules": int,
        "detailed": bool,
        "output_file": str,
    },
    "tensorboard": _CSV_LIKE,
    "csv_monitor": _CSV_LIKE,
    "wandb": {"enabled": bool, "group": str, "team": str, "project": str},
    "comet": {
        "enabled": bool,
        "samples_log_interval": int,
        "project": str,
        "workspace": str,
        "api_key": str,
        "experiment_name": str,
        "experiment_key": str,
        "online": bool,
        "mode": str,
    },
    "timers": {"throughput": {"enabled": bool, "synchronized": bool}},
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
    "log_level": str,
}

# Keys that dist_mem sets, and what to write instead. "auto" is accepted for them.
_PRECISION = "set train.precision"
_FINITE = "leave it out; without it DeepSpeed applies gradients that are not finite"
_BATCH = "set train.lanes and train.micro_lanes; accumulation follows from them and the number of ranks"
OWNED: dict[str, str] = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": "set train.micro_lanes",
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
    "checkpoint": "set checkpoint.every; dist_mem commits and verifies checkpoints itself",
    "steps_per_print": "set tracking.every",
}

# Keys of DeepSpeed that dist_mem does not support.
_OWN_DATA = "dist_mem reads the data itself: see data.* and train.*"
_ONE_AXIS = "lanes are the only axis that dist_mem divides among ranks"
UNSUPPORTED: dict[str, str] = {
    "autotuning": "it starts other jobs",
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "datastates_ckpt": "dist_mem commits and verifies checkpoints itself",
    "expert_parallel": _ONE_AXIS,
    "hybrid_engine": "it is for reinforcement learning",
    "pipeline": _ONE_AXIS,
    "seq_parallel_communication_data_type": _ONE_AXIS,
    "sequence_parallel_size": _ONE_AXIS,
    "tensor_parallel": _ONE_AXIS,
    "use_data_before_expert_parallelism": _ONE_AXIS,
    "vocabulary_size": "it only warns; the vocabulary is the tokenizer's",
    "weight_quantization": "it is for inference",
    "zero_optimization.round_robin_gradients": "DeepSpeed would assemble the weights of such a checkpoint incorrectly",
}

# Keys that DeepSpeed has removed; old files may still contain them.
_GONE = "DeepSpeed 0.19 has removed it"
REMOVED: dict[str, str] = {
    "amp": f"{_GONE}; {_PRECISION}",
    "compression_training": _GONE,
    "curriculum_learning": _GONE,
    "eigenvalue": _GONE,
    "elasticity": f"{_GONE}; train.lanes stays the same whatever the number of ranks",
    "graph_harvesting": _GONE,
    "nebula": _GONE,
    "progressive_layer_drop": _GONE,
    "quantize_training": _GONE,
    "sparse_attention": _GONE,
    "sparse_gradients": _GONE,
    "zero_optimization.mics_shard_size": _GONE,
    "zero_optimization.mics_hierarchical_params_gather": _GONE,
    "zero_optimization.zeropp_loco_param": _GONE,
}
REFUSED = {**OWNED, **UNSUPPORTED, **REMOVED}


def _known_keys() -> dict[str, Any]:
    """Return all keys, refused ones included, so that their typos are recognized too."""
    known = {name: dict(kind) if isinstance(kind, dict) else kind for name, kind in HANDED_ON.items()}
    for key in REFUSED:
        block, _, name = key.rpartition(".")
        (known[block] if block else known)[name] = object
    return known


SCHEMA = _known_keys()


def _is_default(value: Any) -> bool:
    """Return whether a value is "auto" or null, which leaves the key to DeepSpeed or dist_mem."""
    return value is None or (isinstance(value, str) and value == "auto")


def without_defaults(tree: Any) -> Any:
    """Return the block without "auto" and null values, and without blocks that this leaves empty."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {name: without_defaults(child) for name, child in tree.items() if not _is_default(child)}
    return {name: child for name, child in kept.items() if child != {} or tree[name] == {}}


def _whole(tree: Any) -> Any:
    """Return the tree with whole floats such as 5e8 as integers; DeepSpeed accepts them as integers, dist_mem not."""
    if isinstance(tree, Mapping):
        return {name: _whole(child) for name, child in tree.items()}
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
    yield from check_tree(SCHEMA, _whole(block), key=key, everywhere=everywhere, is_open=is_open)
    stage = _find(kept, "zero_optimization.stage")
    if isinstance(stage, int) and stage not in range(4):
        yield Problem(join(key, "zero_optimization.stage"), f"is {stage!r}, but must be 0, 1, 2 or 3")

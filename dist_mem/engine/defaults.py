"""DeepSpeed's configuration: the user's `deepspeed:` block, the keys that are ours, and defaults for others.

DeepSpeed clips at norm 1 by default and ignores unknown top-level keys (refused in the configuration).
"""

from __future__ import annotations

import copy
from typing import Any

from dist_mem.config import TrainConfig

# Elements that GPUs reduce at once; 10^6 per rank keep the message to each rank large: Megatron-LM's rule.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_LARGEST_BUCKET = 500_000_000  # DeepSpeed's default, of which it allocates every element


def deepspeed_config(
    block: dict[str, Any],
    train: TrainConfig,
    *,
    world_size: int,
    accumulation: int,
    num_parameters: int,
    on_gpu: bool = False,
) -> dict[str, Any]:
    """Return the user's `deepspeed:` block with the keys that this project sets, and our defaults for others.

    Gradients of several micro-batches are added up in fp32: bf16 keeps 8 bits of a sum. Stage 1 takes fp32 only with an
    optimizer of DeepSpeed that cannot be saved here. Reduction overlaps the backward on GPUs, in buckets small enough
    for that; on CPUs one bucket holds all gradients.

    Args:
        block: the block as the user wrote it, without the keys that this project sets.
        accumulation: forward and backward passes of one rank in one update.
        num_parameters: trained ones.
    """
    merged = copy.deepcopy(block)
    zero: dict[str, Any] = merged.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    is_offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if stage >= 2 and accumulation > 1 and train.precision != "fp32" and not is_offloaded:
        merged["data_types"] = {"grad_accum_dtype": "fp32", **(merged.get("data_types") or {})}
    if stage:
        largest = max(_BUCKET, _BUCKET_PER_RANK * world_size) if on_gpu else _LARGEST_BUCKET
        zero.setdefault("reduce_bucket_size", min(num_parameters, largest))
    if stage and on_gpu:
        zero.setdefault("overlap_comm", True)
    for precision in ("bf16", "fp16"):
        merged[precision] = {**merged.get(precision, {}), "enabled": train.precision == precision}
    return merged | {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": train.micro_batch_size * accumulation * world_size,
        "gradient_clipping": train.max_grad_norm or 0.0,  # DeepSpeed's default is 1.0
        "zero_allow_untested_optimizer": True,  # torch's optimizers, which our tests check
        "zero_force_ds_cpu_optimizer": False,  # offloading works with torch's Adam too
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per micro-batch
    }

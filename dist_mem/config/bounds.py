"""Upper bounds of numbers: the limits of machines, formats and libraries.

Larger values are refused before anything is allocated. The bounds do not ensure that a model fits into a machine. A
test compares the table with the schema and the options of the memories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dist_mem.config.check import Problem, shown

_SEED = 2**63 - 1  # random numbers are hashes of signed integers of 64 bits
_STEPS = 99_999_999  # the names of checkpoints have eight digits
_WIDTH = 2**20  # 80 times the widest published models
_TOKENS = 2**24  # of a segment or a memory; its attention is computed as one matrix
_LANES = 2**20
_TEXT = 2**40  # tokens of a document; more than any existing text has
_VOCABULARY = 2**31 - 1  # tokenizers count in 32 bits
_TIME = 1_000_000  # libraries add it to a date

MOST: dict[str, int] = {
    "data.max_document_len": _TEXT,
    "data.seed": _SEED,
    "data.prefetch": 10_000,
    "model.num_layers": 4_096,
    "model.d_model": _WIDTH,
    "model.num_heads": _WIDTH,
    "model.d_head": _WIDTH,
    "model.d_inner": 4 * _WIDTH,
    "model.d_embed": _WIDTH,
    "model.adaptive.cutoffs[]": _VOCABULARY,
    "model.adaptive.div_val": 1_024,
    "model.num_positions": _TOKENS,
    "model.token_types[].id": _VOCABULARY,
    "model.token_types[].after[]": _VOCABULARY,
    "model.clamp_len": _TEXT,
    "train.seed": _SEED,
    "train.lanes": _LANES,
    "train.micro_lanes": _LANES,
    "train.seg_len": _TOKENS,
    "train.segments_per_update": 65_536,
    "train.steps": _STEPS,
    "train.epochs": _STEPS,
    "train.threads": 4_096,
    "schedule.warmup_steps": _STEPS,
    "schedule.decay_steps": _STEPS,
    "eval.every": _STEPS,
    "eval.lanes": _LANES,
    "eval.seg_len": _TOKENS,
    "eval.mem_len": _TOKENS,
    "eval.clamp_len": _TEXT,
    "eval.max_document_len": _TEXT,
    "checkpoint.every": _STEPS,
    "checkpoint.every_minutes": _TIME,
    "checkpoint.keep_last": _STEPS,
    "checkpoint.keep_every": _STEPS,
    "checkpoint.keep_best": _STEPS,
    "divergence.window": 1_000_000,
    "divergence.max_times": _STEPS,
    "tracking.every": _STEPS,
    "watchdog.join_seconds": _TIME,
    "watchdog.seconds": _TIME,
    "launch.tasks_per_node": 4_096,
    "launch.cpus_per_task": 4_096,
    "launch.signal_seconds": 65_535,  # Slurm's own
    "launch.chain": 10_000,
    "launch.max_stalled": 10_000,
    "memory.mem_len": _TOKENS,
    "memory.cmem_len": _TOKENS,
    "memory.compression_rate": _TOKENS,
    "memory.num_basis": 2_048,  # the eigenvalues of a square matrix of this size take a minute
    "memory.num_samples": 65_536,
    "memory.num_bins": 65_536,
    "memory.memory_threshold": _TEXT,
}


def generic(key: str) -> str:
    """Return a key as in the tables: `optimizer.groups[].lr`; `memory.mem_len` also for a memory under `over`."""
    return re.sub(r"^memory(\.over)+\.", "memory.", re.sub(r"\[\d+\]", "[]", key))


def check_bounds(leaves: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the numbers above their upper bound; for a memory's options also infinity and nan.

    Args:
        leaves: full key -> value, as from `check.flatten`; other checks handle values of other types.
    """
    for key, value in leaves.items():
        if not isinstance(value, int | float):
            continue
        most = MOST.get(generic(key))
        if key.startswith("memory.") and not math.isfinite(value):  # constraints.RANGES covers the other keys
            yield Problem(key, f"is {value}, but must be a finite number")
        elif most is not None and value > most:
            yield Problem(key, f"is {shown(value)}, but must be at most {most:,}")

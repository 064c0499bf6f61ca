"""Memories of the small runs of jobs.py."""

from typing import Any

from dist_mem.config.memory_blocks import as_block, kinds_of
from dist_mem.memory import memory_class, memory_kinds

SEG_LEN = 16  # of the configurations of jobs.py


def small_memory(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, **memory_class(kind).small_options(SEG_LEN), **options}


def every_memory() -> dict[str, dict[str, Any]]:
    return {kind: small_memory(kind) for kind in memory_kinds()}


def carries_gradient(memory: dict[Any, Any]) -> bool:
    """Return whether gradients flow through a state of a `memory:` block."""
    return any(memory_class(kind).carries_gradient for _, kind in kinds_of(as_block(memory)))

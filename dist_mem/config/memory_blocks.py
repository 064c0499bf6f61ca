"""One memory for every block of the model, or a memory for each: `memory` as a block with a kind, a map or a list.

    memory: {kind: transformer_xl, mem_len: 640}            every block has this one
    memory: {default: none, 8: {kind: infini}}              block 8, counted from 0, has another one
    memory: [none, none, {kind: transformer_xl, mem_len: 64}]   one item for each block

A map or list becomes a block of kind `per_block`, with a memory under each key. A memory without options may be given
by its kind alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

PER_BLOCK = "per_block"
DEFAULT = "default"
_INDEX = re.compile("0|[1-9][0-9]*")


def as_block(memory: Any) -> Any:
    """Return `memory` as a block with a kind; anything that is neither a map nor a list of memories as it is."""
    if isinstance(memory, list):
        memory = dict(enumerate(memory))
    elif not isinstance(memory, Mapping) or not any(is_key(name) for name in memory):
        return memory
    return {**with_kinds(memory), "kind": memory.get("kind", PER_BLOCK)}


def with_kinds(memory: Any) -> Any:
    """Return `memory` with a block for every memory of a block of the model that is given by its kind alone."""
    if isinstance(memory, list):
        return [with_kinds({DEFAULT: given})[DEFAULT] for given in memory]
    if not isinstance(memory, Mapping):
        return memory
    return {
        str(name): {"kind": given} if is_key(name) and isinstance(given, str) else given
        for name, given in memory.items()
    }


def is_per_block(memory: Any) -> bool:
    """Return whether the `memory` block of a configuration has a memory for each block of the model."""
    return isinstance(memory, Mapping) and memory.get("kind") == PER_BLOCK


def memories_of(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return full key -> block of every memory: {"memory": ...}, or {"memory.default": ..., "memory.8": ...}."""
    if not is_per_block(memory):
        return {"memory": memory}
    return {f"memory.{name}": memory[name] for name in memory if name != "kind"}


def memory_of(memory: Mapping[str, Any], layer_index: int) -> tuple[str, Any]:
    """Return key and block of the memory of a block of the model.

    Raises:
        ValueError: the configuration has none for it.
    """
    memories = memories_of(memory)
    for key in ("memory", f"memory.{layer_index}", f"memory.{DEFAULT}"):
        if key in memories:
            return key, memories[key]
    raise ValueError(f"memory.{layer_index} is missing: give it, or memory.{DEFAULT} for all blocks without their own")


def kinds_of(memory: Any, key: str = "memory") -> Iterator[tuple[str, str]]:
    """Yield key and kind of every memory of a `memory` block, also of memories below one; blocks are unchecked."""
    if not isinstance(memory, Mapping):
        return
    if isinstance(kind := memory.get("kind"), str) and kind != PER_BLOCK:
        yield f"{key}.kind", kind
    for name, child in memory.items():
        yield from kinds_of(child, f"{key}.{name}")


def describe_memory(memory: Mapping[str, Any]) -> str:
    """Return the memories of a configuration by kind: `infinite over lamemo`, `default: none, 8: infini`."""
    if is_per_block(memory):
        return ", ".join(
            f"{key.partition('.')[2]}: {describe_memory(each)}" for key, each in memories_of(memory).items()
        )
    kind, below = str(memory["kind"]), memory.get("over") or {"kind": "none"}
    return kind if below["kind"] == "none" else f"{kind} over {describe_memory(below)}"


def is_key(name: Any) -> bool:
    """Return whether this is the key of the memory of a block of the model, or of all others."""
    return str(name) == DEFAULT or _INDEX.fullmatch(str(name)) is not None

"""What is known of every key of a configuration, and the keys in which two configurations differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_mem.config.check import block_of, flatten
from dist_mem.config.deepspeed_keys import OF_RESULT, PATHS
from dist_mem.config.keys import EVALUATION, FREE, RESULT, SPEED, Affects, Command, KeyMetadata, find_key, keys_of
from dist_mem.config.schema import Config

KERNELS = KeyMetadata(resume=FREE, affects=SPEED, set_by=EVALUATION)  # of a memory's option `kernels`: what computes it


def metadata_of(key: str) -> KeyMetadata:
    """Return the metadata of a key, also of DeepSpeed's, of a memory's options, and of keys that no version knows.

    A memory's options have the rules of `memory`, except one called `kernels`: it chooses what computes the memory.
    """
    if found := find_key(Config, key):
        return found.metadata
    block, _, name = key.rpartition(".")
    own = KeyMetadata()
    if key.startswith("deepspeed."):
        rule = OF_RESULT.get(key.removeprefix("deepspeed."))
        own = KeyMetadata(may_be_empty=True, is_path=name in PATHS, resume=rule, affects=RESULT if rule else None)
    elif key.startswith("memory."):
        own = KERNELS if name == "kernels" else KeyMetadata(is_path=name == "kind")  # which may be PATH.py:CLASS
    return own.inside(metadata_of(block)) if block else own


def select_keys(tree: Mapping[str, Any], *, affects: Affects) -> dict[str, Any]:
    """Return the keys of a configuration that affect one of these, by full name; a list is one value.

    Args:
        tree: a configuration, or keys selected from one. What is not of the schema is returned too.
    """
    leaves = flatten(tree, into_lists=False)
    return {key: value for key, value in leaves.items() if (metadata_of(key).affects or affects) in affects}


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys of two flat trees whose values differ, in their order.

    A missing key, null, and an empty block or list are equal.
    """
    nothing: tuple[Any, ...] = (None, {}, [])
    pairs = ((key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]))
    return [key for key, was, now in pairs if was != now and not (was in nothing and now in nothing)]


def keys_set_by(command: Command) -> list[str]:
    """Return the keys that a command on a trained run may set, `eval.*` for a whole block."""
    found = [name for name, key in keys_of(Config).items() if may_set(command, name)]
    blocks = {name for name in found if block_of(keys_of(Config)[name].schema)}
    names = [f"{name}.*" if name in blocks else name for name in found if name.rpartition(".")[0] not in blocks]
    return [*names, *(["memory.kernels"] if may_set(command, "memory.kernels") else [])]


def may_set(command: Command, key: str) -> bool:
    """Return whether a command on a trained run may set a key."""
    return command in (metadata_of(key).set_by or Command(0))

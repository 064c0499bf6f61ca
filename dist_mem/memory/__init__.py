"""The registry of memories: `memory.kind: NAME` selects the class in dist_mem/memory/NAME.py; there is no list to edit.

Other kinds are looked up outside the package (dist_mem/memory/outside.py).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from dist_mem.config import build_block
from dist_mem.config.check import format_value, nearest
from dist_mem.config.memory_blocks import DEFAULT, PER_BLOCK, is_key, is_per_block, memories_of, memory_of
from dist_mem.memory.base import LayerSpec, Memory, keys_begin_with
from dist_mem.memory.outside import is_file, load_from_file, load_offered, offered_kinds
from dist_mem.runtime.shipped_files import shipped_root


def memory_kinds() -> list[str]:
    """Return the kinds of all built-in memories, which are their file names, sorted."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(names - {"base", "outside", "parts"})


def memory_class(kind: str, where: str = "memory") -> type[Memory]:
    """Return the class of a memory, built-in or external; `where` is the key of its block, for messages.

    Raises:
        ValueError: there is no such memory; the message names the nearest one.
    """
    if is_file(kind):
        return load_from_file(kind, where)
    kinds, offered = memory_kinds(), offered_kinds()
    if kind not in kinds and kind in offered:
        return load_offered(kind, where)
    if kind not in kinds:
        allowed, files = [*kinds, *offered], _configurations()
        meant = nearest(kind, [*files, *allowed])
        name = f"the file {files[meant]}" if meant in files.keys() - {*allowed} else meant
        way = f"; did you mean {name}?" if meant else ""
        known = f"{', '.join(allowed)} or PATH.py:CLASS"
        raise ValueError(f"{where}.kind is {format_value(kind)}, but must be one of {known}{way}")
    module = importlib.import_module(f"{__name__}.{kind}")
    defined = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    found = [value for value in defined if isinstance(value, type) and issubclass(value, Memory)]
    if len(found) != 1:
        names = [found_class.__name__ for found_class in found]
        raise ValueError(f"{module.__file__} must define exactly one Memory, but defines {names}")
    return found[0]


def _configurations() -> dict[str, str]:
    """Return name -> file of the configurations of memories, some of which have a name that is no kind: deltanet."""
    files = (shipped_root() / "configs" / "memory").glob("*.yaml")
    return {path.stem: f"configs/memory/{path.name}" for path in sorted(files)}


def describe_memories() -> dict[str, tuple[str, type]]:
    """Return for each built-in kind the first line of its file, and the dataclass of its options."""
    described: dict[str, tuple[str, type]] = {}
    for kind in memory_kinds():
        chosen = memory_class(kind)
        summary = (sys.modules[chosen.__module__].__doc__ or "").partition("\n")[0]
        described[kind] = (summary, chosen.Options)
    return described


def memory_title(memory: Mapping[str, Any]) -> str:
    """Return the memory of a saved configuration by the name in its paper: `infinity-former over Transformer-XL`.

    Of a memory for each block: `default: no memory, 8: Infini-attention`. One that this version does not know, or that
    is not of this package, goes by its kind: no code of others runs for a name.
    """
    if is_per_block(memory):
        return ", ".join(f"{key.partition('.')[2]}: {memory_title(each)}" for key, each in memories_of(memory).items())
    kind, over = str(memory["kind"]), memory.get("over") or {"kind": "none"}
    title = kind
    if kind in memory_kinds():
        chosen = memory_class(kind)
        known = chosen.Options()
        given = {name: memory[name] for name in vars(known) if name in memory}
        title = chosen.title_of(replace(known, **given)) or kind
    return title if over["kind"] in ("none", "causal") else f"{title} over {memory_title(over)}"


def memory_options(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's `memory` block with all options of every memory in it.

    Raises:
        ValueError: as `convert_options`.
    """
    if not is_per_block(block):
        if of_one := [name for name in block if is_key(name)]:
            other = f"but memory.kind = {block.get('kind')} is that of all: write memory.{DEFAULT}.kind"
            raise ValueError(f"memory.{of_one[0]} is the memory of one block, {other}")
        return _add_defaults(block, "memory")
    if others := [name for name in block if name != "kind" and not is_key(name)]:
        own = f"memory.{DEFAULT}.{others[0]} or memory.NUMBER.{others[0]}"
        raise ValueError(f"memory.{others[0]} is no memory of a block; an option belongs to one memory: {own}")
    memories = {name: _add_defaults(each, f"memory.{name}") for name, each in block.items() if name != "kind"}
    return {"kind": PER_BLOCK, **memories}


def _add_defaults(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind, options = convert_options(block, where)
    return {"kind": kind, **asdict(options)}


def convert_options(block: Mapping[str, Any], where: str = "memory") -> tuple[str, Any]:
    """Return the kind and the typed options of the block of one memory; `over` blocks get all their options.

    Args:
        where: key of the block in the configuration, for messages.

    Raises:
        ValueError: an unknown kind or key (the message names the nearest known one), or a value of the wrong type.
    """
    if not isinstance(block, Mapping) or not isinstance(block.get("kind"), str):
        kinds = ", ".join(memory_kinds())
        if isinstance(block, Mapping) and "kind" not in block and is_key(where.rpartition(".")[2]):
            rest = f"memory.{DEFAULT} is for all blocks without their own"
            raise ValueError(f"{where}.kind is missing: give it, one of {kinds}; {rest}")
        raise ValueError(f"{where} is {format_value(block)}, but must be a block whose kind is one of {kinds}")
    given = dict(block)
    kind = str(given.pop("kind"))
    known: Any = memory_class(kind, where).Options
    default = getattr(known, "over", {})  # None, or no value, as it is a factory
    has_over = "over" in {field.name for field in fields(known)}
    if has_over and not isinstance(over := given.get("over", default), Mapping) and (over or default) is not None:
        raise ValueError(f"{where}.over is {format_value(over)}, but must be a block with a kind")
    options: Any = build_block(known, given, where)
    if getattr(options, "over", None) is not None:
        options = replace(options, over=_add_defaults(given.get("over", options.over), f"{where}.over"))
    return kind, options


def build_memory(config: Mapping[str, Any], spec: LayerSpec) -> Memory:
    """Build the memory layer of one block of the model, from the `memory` block of a configuration."""
    key, block = memory_of(config, spec.layer_index)
    kind, options = convert_options(block, key)
    with keys_begin_with(key):
        return _build(kind, options, spec)


def _build(kind: str, options: Any, spec: LayerSpec) -> Memory:
    """Build a memory; one with the option `over` is built over that memory."""
    build: Any = memory_class(kind)
    below: list[Memory] = []
    if getattr(options, "over", None) is not None:
        with keys_begin_with("memory.over"):
            below.append(_build(*convert_options(options.over), spec))
            assert not build.reads_evicted or below[0].evicted_len, (
                "raises ValueError here, where the key of the message can be corrected"
            )
    memory: Memory = build(spec, options, *below)
    if any(each.keeps_outputs for each in below) and type(memory).after_block is Memory.after_block:
        raise ValueError(
            f"memory.over keeps what the block makes of its rows, but memory.kind = {kind} does not pass `after_block` "
            "on to it: set memory.over to another memory, or define `after_block`"
        )
    if spec.short_first and not memory.takes_short_first:
        raise ValueError(
            f"data.cut is end, but memory.kind = {kind} keeps whole segments only, and there a document begins with a "
            "short one: set data.cut to start, or memory.kind to none, causal, or infinite over one of these"
        )
    if spec.tf32 and memory.needs_exact_products:
        raise ValueError(
            f"train.tf32 is true, but memory.kind = {kind} computes in exact fp32: set train.tf32 to false; "
            "train.precision = bf16 is faster still, and leaves these products exact"
        )
    return memory

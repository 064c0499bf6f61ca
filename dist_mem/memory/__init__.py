"""The registry of memories: `memory.kind: NAME` is the class in dist_mem/memory/NAME.py; there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from dist_mem.config import merge_checked
from dist_mem.config_check import nearest
from dist_mem.memory.base import LayerSpec, Memory


def memory_kinds() -> list[str]:
    """Every built-in memory, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def memory_class(kind: str) -> type[Memory]:
    """The memory of that name.

    Raises:
        ValueError: no such file in this package; names the nearest one.
    """
    kinds = memory_kinds()
    if kind not in kinds:
        meant = nearest(str(kind), kinds, 0.0)
        raise ValueError(f"memory.kind is {kind!r}, but must be one of {', '.join(kinds)}; did you mean {meant}?")
    module = importlib.import_module(f"{__name__}.{kind}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    found = [value for value in own if isinstance(value, type) and issubclass(value, Memory)]
    if len(found) != 1:
        names = [found_class.__name__ for found_class in found]
        raise ValueError(f"{module.__file__} must define exactly one Memory, but defines {names}")
    return found[0]


def described_memories() -> dict[str, tuple[str, type]]:
    """Kind -> the first line of its file, and the dataclass of its options."""
    described: dict[str, tuple[str, type]] = {}
    for kind in memory_kinds():
        chosen = memory_class(kind)
        summary = (sys.modules[chosen.__module__].__doc__ or "").partition("\n")[0]
        described[kind] = (summary, chosen.Options)
    return described


def memory_options(block: Mapping[str, Any]) -> tuple[str, Any]:
    """Kind and typed options of a configuration's `memory` block.

    Raises:
        ValueError: an unknown kind or key (names the nearest known one), or a value of the wrong type.
    """
    if "kind" not in block:
        raise ValueError(f"memory.kind is missing; give one of {', '.join(memory_kinds())}")
    given = {key: value for key, value in block.items() if key != "kind"}
    checked = merge_checked(memory_class(block["kind"]).Options, given, "memory")
    return block["kind"], OmegaConf.to_object(checked)


def build_memory(block: Mapping[str, Any], spec: LayerSpec) -> Memory:
    """The memory layer of one block of the model."""
    kind, options = memory_options(block)
    return memory_class(kind)(spec, options)

"""Load memories from outside the package: from a file, or from an installed package that offers one.

memory: {kind: ./my_memory.py:MyMemory}      # the path as seen from where the command is started
memory: {kind: my_memory}                    # an entry point of the group dist_mem.memories
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dist_mem.config.memory_blocks import kinds_of
from dist_mem.memory.base import Inspectable, Memory
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.outside_code import copies, copy_names, load_named, source_of

GROUP = "dist_mem.memories"
_FOLDER = "memory"  # of the copies in a run


def is_file(kind: str) -> bool:
    """Return whether a kind names a class in a file."""
    return ":" in kind


def offered_kinds() -> list[str]:
    """Return the names under which installed packages offer memories."""
    return _find_offered(tuple(sys.path))


@cache  # it reads the metadata of every installed package, and every block of a model asks
def _find_offered(search_path: tuple[str, ...]) -> list[str]:
    return sorted(entry_points(group=GROUP).names)


def load_offered(kind: str, where: str) -> type[Memory]:
    """Return the memory class that an installed package offers under this name.

    Raises:
        ValueError: what the package offers is no memory or does not load, or several packages offer one.
    """
    offers = list(entry_points(group=GROUP, name=kind))
    packages = [offer.dist.name for offer in offers if offer.dist]
    key = f"{where}.kind is {kind!r}"
    if len(offers) > 1:
        raise ValueError(f"{key}, which {' and '.join(packages)} offer: uninstall all but one, or give PATH.py:CLASS")
    what = f"{key}: the entry point {offers[0].value} of {packages[0]}"
    try:
        found = offers[0].load()
    except Exception as error:  # report any error of a user's package in one line
        raise ValueError(f"{what} does not load: {type(error).__name__}: {error}") from error
    return _check_class(found, what)


def load_from_file(kind: str, where: str = "memory") -> type[Memory]:
    """Return the memory class of `PATH:CLASS`. Raises ValueError as `load_named`, or if it is no memory."""
    return _check_class(load_named(kind, f"{where}.kind"), f"{where}.kind is {kind!r}: {kind.rpartition(':')[2]}")


def _check_class(found: Any, what: str) -> type[Memory]:
    if not (isinstance(found, type) and issubclass(found, Memory)):
        raise ValueError(f"{what} is no class derived from dist_mem.memory.base.Memory")
    if not issubclass(found, Inspectable) and any(hasattr(found, name) for name in ("inspect", "forget")):
        raise ValueError(f"{what} inspects or forgets: derive it from dist_mem.memory.base.Inspectable, not Memory")
    return found


def sources(block: Mapping[str, Any]) -> dict[str, str]:
    """Return the memory files that a run keeps a copy of, as `memory/NAME.py` -> text, for its `memory:` block."""
    return copies((kind for _, kind in _files_of(block)), _FOLDER)


def kept_kinds(block: Mapping[str, Any], directory: Path) -> list[str]:
    """Return overrides that point a `memory:` block at the copies of its files (`sources`) in `directory`."""
    names = copy_names((kind for _, kind in _files_of(block)), _FOLDER)
    kept = {key: f"{directory / names[source_of(kind)]}:{kind.rpartition(':')[2]}" for key, kind in _files_of(block)}
    return [f"{key}=" + json_text(kind.replace("${", r"\${")) for key, kind in kept.items()]  # no interpolation


def files_of(block: Mapping[str, Any]) -> list[Path]:
    """Return the files that define the memories of a `memory:` block."""
    return [source_of(kind) for _, kind in _files_of(block)]


def _files_of(block: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return key and value of every kind that names a file."""
    return [(key, kind) for key, kind in kinds_of(block) if is_file(kind)]

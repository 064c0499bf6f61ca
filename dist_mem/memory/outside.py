"""Load memories from outside the package: from a file, or from an installed package that offers one.

memory: {kind: ./my_memory.py:MyMemory}      # the path as seen from where the command is started
memory: {kind: my_memory}                    # an entry point of the group dist_mem.memories
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from itertools import chain, count
from pathlib import Path
from typing import Any

from dist_mem.config.memory_blocks import kinds_of
from dist_mem.memory.base import Inspectable, Memory
from dist_mem.runtime.environment import as_submitted
from dist_mem.runtime.files import read_regular, sha256_of

GROUP = "dist_mem.memories"
# Methods of an earlier contract: without an error, the model would silently never call them.


def is_file(kind: str) -> bool:
    """Return whether a kind names a class in a file."""
    return ":" in kind


def offered_kinds() -> list[str]:
    """Return the names under which installed packages offer memories."""
    return _offered_along(tuple(sys.path))


@cache  # it reads the metadata of every installed package, and every block of a model asks
def _offered_along(search_path: tuple[str, ...]) -> list[str]:
    return sorted(entry_points(group=GROUP).names)


def load_offered(kind: str) -> type[Memory]:
    """Return the memory class that an installed package offers under this name.

    Raises:
        ValueError: the package offers something else.
    """
    (offer,) = entry_points(group=GROUP, name=kind)
    return _checked(offer.load(), f"the entry point {kind} ({offer.value})")


def load_from_file(kind: str, where: str = "memory") -> type[Memory]:
    """Return the memory class of `PATH:CLASS`; the file runs once, even if several blocks use it.

    Raises:
        ValueError: no such file or class, or the file does not run; names the file, and the line that failed.
    """
    path, name = source_of(kind), kind.rpartition(":")[2]
    if not path.is_file():
        raise ValueError(
            f"{where}.kind is {kind!r}: there is no file {path.absolute()}; start the command in the folder from which "
            "the path is right, for a trained run where it was trained"
        )
    module_name = f"dist_mem_outside_{sha256_of(path)[:16]}"
    if module_name not in sys.modules:
        _run(path, module_name)
    found = getattr(sys.modules[module_name], name, None)
    if found is None:
        raise ValueError(f"{where}.kind is {kind!r}: {path} has no {name}")
    return _checked(found, f"{where}.kind is {kind!r}: {name}")


def _run(path: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while the file runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # report any error of a user's file in one line, with its location
        del sys.modules[module_name]
        raise ValueError(f"{path}{line_in(path, error)} does not run: {type(error).__name__}: {error}") from error


def line_in(path: Path, error: Exception) -> str:
    """Return the innermost line of the file in the error's traceback, as `, line 12`; empty if there is none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines, traceback = [], error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path.absolute():
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f", line {lines[-1]}" if lines else ""


def _checked(found: Any, what: str) -> type[Memory]:
    if not (isinstance(found, type) and issubclass(found, Memory)):
        raise ValueError(f"{what} is no class derived from dist_mem.memory.base.Memory")
    if not issubclass(found, Inspectable) and any(hasattr(found, name) for name in ("inspect", "forget")):
        raise ValueError(f"{what} inspects or forgets: derive it from dist_mem.memory.base.Inspectable, not Memory")
    return found


def source_of(kind: str) -> Path:
    """Return the file of a kind `PATH:CLASS`."""
    return as_submitted(Path(kind.rpartition(":")[0]))


def sources(block: Mapping[str, Any]) -> dict[str, str]:
    """Return the memory files that a run keeps a copy of, as `memory/NAME.py` -> text, for its `memory:` block."""
    return {name: read_regular(path).decode() for path, name in _kept_names(block).items()}


def kept_kinds(block: Mapping[str, Any], directory: Path) -> list[str]:
    """Return overrides that point a `memory:` block at the copies of its files (`sources`) in `directory`."""
    names = _kept_names(block)
    return [f"{key}={directory / names[source_of(kind)]}:{kind.rpartition(':')[2]}" for key, kind in _files_of(block)]


def files_of(block: Mapping[str, Any]) -> list[Path]:
    """Return the files that define the memories of a `memory:` block."""
    return [source_of(kind) for _, kind in _files_of(block)]


def _kept_names(block: Mapping[str, Any]) -> dict[Path, str]:
    """Return the name of each file's copy; a second file of the same name becomes `memory/2-NAME.py`."""
    names: dict[Path, str] = {}
    for path in dict.fromkeys(source_of(kind) for _, kind in _files_of(block)):
        numbered = (f"memory/{number}-{path.name}" for number in count(2))
        names[path] = next(name for name in chain([f"memory/{path.name}"], numbered) if name not in names.values())
    return names


def _files_of(block: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return key and value of every kind that names a file."""
    return [(key, kind) for key, kind in kinds_of(block) if is_file(kind)]

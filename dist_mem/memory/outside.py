"""Memories from outside the package: a file, or a package that offers one.

memory: {kind: ./my_memory.py:MyMemory}      # the path as seen from where the command is started
memory: {kind: my_memory}                    # an entry point of the group dist_mem.memories
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_mem.runtime.environment import as_submitted

if TYPE_CHECKING:
    from dist_mem.memory.base import Memory

GROUP = "dist_mem.memories"


def is_file(kind: str) -> bool:
    """Whether a kind names a class in a file."""
    return ":" in kind


def offered_kinds() -> list[str]:
    """Names under which installed packages offer memories."""
    return sorted(entry_points(group=GROUP).names)


def load_offered(kind: str) -> type[Memory]:
    """The memory that an installed package offers under this name. Raises ValueError if it is none."""
    (offer,) = entry_points(group=GROUP, name=kind)
    return _checked(offer.load(), f"the entry point {kind} ({offer.value})")


def load_from_file(kind: str, where: str = "memory") -> type[Memory]:
    """The memory `PATH:CLASS`; the file is read once, however often it is asked for.

    Raises:
        ValueError: no such file or class, or the file does not run; names the file, and the line where one is to blame.
    """
    path, name = source_of(kind), kind.rpartition(":")[2]
    if not path.is_file():
        raise ValueError(
            f"{where}.kind is {kind!r}: there is no file {path.absolute()}; start the command in the folder from which "
            "the path is right, for a trained run where it was trained"
        )
    module_name = f"dist_mem_outside_{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
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
    except Exception as error:  # whatever a user's file raises is told in one line, with where it happened
        del sys.modules[module_name]
        raise ValueError(f"{path}{line_in(path, error)} does not run: {type(error).__name__}: {error}") from error


def line_in(path: Path, error: Exception) -> str:
    """The innermost line of that file that an error passed through, as `, line 12`."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines, traceback = [], error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path.absolute():
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f", line {lines[-1]}" if lines else ""


def _checked(found: Any, what: str) -> type[Memory]:
    from dist_mem.memory.base import Memory  # its package imports this module

    if not (isinstance(found, type) and issubclass(found, Memory)):
        raise ValueError(f"{what} is no class derived from dist_mem.memory.base.Memory")
    return found


def source_of(kind: str) -> Path:
    """The file of a kind `PATH:CLASS`."""
    return as_submitted(Path(kind.rpartition(":")[0]))


def sources(block: Mapping[str, Any]) -> dict[str, str]:
    """What a run keeps of the files that its `memory:` block takes memories from: `memory/NAME.py` and its text."""
    return {name: path.read_text(encoding="utf-8") for path, name in _kept_names(block).items()}


def kept_kinds(block: Mapping[str, Any], directory: Path) -> list[str]:
    """Overrides that make a `memory:` block take its files as `sources` has kept them in `directory`."""
    names = _kept_names(block)
    return [f"{key}={directory / names[source_of(kind)]}:{kind.rpartition(':')[2]}" for key, kind in _files_of(block)]


def files_of(block: Mapping[str, Any]) -> list[Path]:
    """The files that a `memory:` block takes memories from."""
    return [source_of(kind) for _, kind in _files_of(block)]


def _kept_names(block: Mapping[str, Any]) -> dict[Path, str]:
    """Each file and the name it is kept under; a second one of the same name is `memory/2-NAME.py`."""
    names: dict[Path, str] = {}
    for path in dict.fromkeys(source_of(kind) for _, kind in _files_of(block)):
        numbered = (f"memory/{number}-{path.name}" for number in count(2))
        names[path] = next(name for name in chain([f"memory/{path.name}"], numbered) if name not in names.values())
    return names


def _files_of(block: Any, key: str = "memory") -> Iterator[tuple[str, str]]:
    """Key and value of every kind that names a file, the ones it lies over too; a block may not be checked yet."""
    if not isinstance(block, Mapping):
        return
    if isinstance(kind := block.get("kind"), str) and is_file(kind):
        yield f"{key}.kind", kind
    yield from _files_of(block.get("over"), f"{key}.over")

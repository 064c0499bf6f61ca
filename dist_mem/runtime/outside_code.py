"""Load a class from a file of the user: `PATH.py:CLASS`, the path as seen from where the command is started.

Such a file is a program. Only what the user names for a training, or allows (`eval.allow_code`), is loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from typing import Any

from dist_mem.runtime.environment import as_submitted
from dist_mem.runtime.files import is_file, read_regular, sha256_of
from dist_mem.runtime.names import check_plain


def load_named(named: str, key: str) -> Any:
    """Return what `PATH:NAME` names; the file runs once, even if several keys name it.

    Args:
        key: of the configuration, for messages.

    Raises:
        ValueError: no such file, none that a checkpoint can keep, no such name, or it does not run; names the line.
    """
    path, name = source_of(named), named.rpartition(":")[2]
    if not is_file(path):
        raise ValueError(
            f"{key} is {named!r}: there is no file {path.absolute()}; start the command in the folder from which "
            "the path is right, for a trained run where it was trained"
        )
    check_plain(path.name, f"{key} is {named!r}: checkpoints keep a copy of {path}, whose name")
    try:
        read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key} is {named!r}: {path} is not UTF-8: {error}; convert it, as with iconv") from error
    module_name = f"dist_mem_outside_{sha256_of(path)[:16]}"
    if module_name not in sys.modules:
        _run(path, module_name)
    found = getattr(sys.modules[module_name], name, None)
    if found is None:
        raise ValueError(f"{key} is {named!r}: {path} has no {name}")
    return found


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


def source_of(named: str) -> Path:
    """Return the file of `PATH:CLASS`."""
    return as_submitted(Path(named.rpartition(":")[0]))


def copies(named: Iterable[str], folder: str) -> dict[str, str]:
    """Return the files that a run keeps a copy of, as `FOLDER/NAME.py` -> text."""
    return {name: read_regular(path).decode() for path, name in copy_names(named, folder).items()}


def copy_names(named: Iterable[str], folder: str) -> dict[Path, str]:
    """Return the name of each file's copy; a second file of the same name becomes `FOLDER/2-NAME.py`."""
    names: dict[Path, str] = {}
    for path in dict.fromkeys(map(source_of, named)):
        numbered = (f"{folder}/{number}-{path.name}" for number in count(2))
        names[path] = next(name for name in chain([f"{folder}/{path.name}"], numbered) if name not in names.values())
    return names

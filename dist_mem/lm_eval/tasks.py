"""Tasks of lm-evaluation-harness, loaded as by its own command: the same seeds, so the same prompts and examples."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from dist_mem.config.check import nearest
from dist_mem.errors import UnusableError, run_error

_TASKS = lm_eval.tasks.__name__  # the package, with a folder of each family of tasks
_FOLDER = Path(lm_eval.tasks.__file__).parent
_NAMED_LENGTHS = "babilong"  # how tasks begin whose lengths have names


class RandomStates(NamedTuple):
    """The states of the random number generators that a task's program may use."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> RandomStates:
        """Return the present states."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Make these the present states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


def load_tasks(
    names: Sequence[str],
    folder: Path | None,
    *,
    metadata: Mapping[str, Any] | None = None,
    length: int | None = None,
    remark: str = "",
) -> TaskDict:
    """Load tasks, groups and tags by name or pattern (`mmlu_*`), with seeds and examples as the harness's own command.

    Args:
        folder: with YAML files of further tasks. If it has all of `names`, the harness's own thousands of tasks, whose
            index takes seconds, are not looked at.
        metadata: what tasks that make their data are given.
        length: of the texts, in tokens; None: as the tasks or the metadata say.
        remark: added to the message of a task that has no tokenizer.

    Raises:
        UnusableError: there is no such task, its file or its data are wrong, or it has no texts of this length.
        UnfitError: its data cannot be fetched now.
    """
    if not names:
        raise UnusableError("--tasks is empty: give the names of tasks, separated by commas")
    forms = [names] if length is None else _by_form(names)
    _forget_programs()
    loaded: TaskDict = {"tasks": {}, "groups": {}, "group_map": {}}
    # Data with named lengths first: a length that is missing is found before others make their texts, for minutes.
    parts = [_load_form(group, folder, metadata or {}, length, remark) for group in reversed(forms)]
    for part in reversed(parts):
        for kind, entries in part.items():
            loaded[kind].update(entries)
    for name, task in loaded["tasks"].items():
        if length is not None and task.config.custom_dataset is None:
            raise UnusableError(f"--lengths: the texts of {name} have lengths of their own: give it a command without")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _load_form(
    names: Sequence[str], folder: Path | None, metadata: Mapping[str, Any], length: int | None, remark: str
) -> TaskDict:
    """Load tasks that take a length in the same form. Raises as `load_tasks`."""
    given = dict(metadata)
    if length is not None:
        given["max_seq_lengths"] = _length_for(names[0], length)
    manager, found = _find(names, folder, given)
    random.seed(DEFAULT_RANDOM_SEED)  # of which tasks make their texts
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    try:
        loaded: TaskDict = manager.load(found)
        return loaded
    except Exception as error:  # of the harness, the library of the data, or the task's own program
        is_named = length is not None and names[0].startswith(_NAMED_LENGTHS)
        which = _first_that_fails(manager, found) if is_named else ",".join(names)
        at = f" with texts of {given['max_seq_lengths']} (--lengths {length})" if is_named else ""
        text = f"--tasks {which} cannot be loaded{at}: {type(error).__name__}: {error}"
        text += remark if "tokenizer" in str(error).lower() else ""
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise run_error(error, text) from error
        fix = f"; leave this length out of --lengths, or {which} out of --tasks" if is_named else ""
        raise UnusableError(text + fix) from error


def _first_that_fails(manager: TaskManager, names: Sequence[str]) -> str:
    """Return the first of these tasks that cannot be loaded on its own; all names if each can."""
    for name in names:
        try:
            manager.load([name])
        except Exception:  # of any class, as in _load_form, which reports it
            return name
    return ",".join(names)


def _forget_programs() -> None:
    """Forget the modules of tasks that were loaded before, so that each load is as the first one of a process.

    The harness keeps them. The generator of `ruler_cwe` is in its module and would go on from load to load.
    """
    parts = f"{_TASKS}."
    for name, module in list(sys.modules.items()):
        of_harness = name.startswith(parts) and (_FOLDER / name.removeprefix(parts).partition(".")[0]).is_dir()
        if of_harness or "__mtime__" in getattr(module, "__dict__", ()):  # which the harness notes of what it loads
            del sys.modules[name]


def _find(names: Sequence[str], folder: Path | None, metadata: Mapping[str, Any]) -> tuple[TaskManager, list[str]]:
    """Return a manager that has the tasks, and their names. Raises UnusableError if there is no such task."""
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=dict(metadata))
    if folder is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=folder, metadata=dict(metadata))
    found: list[str] = []
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            raise UnusableError(_unknown(name, folder, manager.all_tasks))
        found += [match for match in matches if match not in found]
    return manager, found


def _by_form(names: Sequence[str]) -> list[list[str]]:
    """Return the names in groups that take a length in the same form."""
    named = [name for name in names if name.startswith(_NAMED_LENGTHS)]
    return [group for group in ([name for name in names if name not in named], named) if group]


def _length_for(name: str, length: int) -> Any:
    """Return a length as `max_seq_lengths` of a task: a list of numbers, or BABILong's name of its texts, as 4k.

    Raises:
        UnusableError: BABILong has no texts of this length.
    """
    if not name.startswith(_NAMED_LENGTHS):
        return [length]
    if length % 1024:
        raise UnusableError(f"--lengths {length}: the texts of {name} have whole thousands of tokens: 1k, 2k, 4k, 128k")
    return f"{length >> 20}M" if length % (1 << 20) == 0 else f"{length >> 10}k"


@contextmanager
def read_copies(folder: Path | None) -> Iterator[None]:
    """Within it, `datasets.load_dataset("OWNER/NAME")` reads FOLDER/OWNER/NAME if that is there; None: as ever.

    So a task needs no network, and no cache of the library that fits its version.
    """
    load = datasets.load_dataset

    def load_copy(path: str, *arguments: Any, **options: Any) -> Any:
        if folder is not None and path and (folder / path).is_dir():
            path = str(folder / path)
        return load(path, *arguments, **options)

    datasets.load_dataset = load_copy
    try:
        yield
    finally:
        datasets.load_dataset = load


def _unknown(name: str, folder: Path | None, known: Sequence[str]) -> str:
    close = nearest(name, known)
    meant = f"; did you mean {close}?" if close else ""
    if folder is None:
        return f"--tasks {name}: the harness has no such task{meant or '; give the folder of your own: --include-path'}"
    why = "; a file there is passed over if it is not valid YAML or has no entry `task`"
    return f"--tasks {name}: neither {folder} nor the harness has such a task{meant}{why}"

"""Tasks of lm-evaluation-harness, loaded as by its own command: the same seeds, so the same prompts and examples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from dist_mem.config.check import nearest
from dist_mem.errors import UnusableError, run_error

_NAMED_LENGTHS = "babilong"  # how tasks begin whose lengths have names


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
    loaded: TaskDict = {"tasks": {}, "groups": {}, "group_map": {}}
    random.seed(DEFAULT_RANDOM_SEED)  # of which tasks make their texts
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    for group in forms:
        given = dict(metadata or {})
        if length is not None:
            given["max_seq_lengths"] = _length_for(group[0], length)
        manager, found = _find(group, folder, given)
        try:
            for kind, entries in manager.load(found).items():
                loaded[kind].update(entries)
        except Exception as error:  # of the harness, the library of the data, or the task's own program
            text = f"--tasks {','.join(group)} cannot be loaded: {type(error).__name__}: {error}"
            text += remark if "tokenizer" in str(error).lower() else ""
            passes = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            raise (run_error(error, text) if passes else UnusableError(text)) from error
    for name, task in loaded["tasks"].items():
        if length is not None and task.config.custom_dataset is None:
            raise UnusableError(f"--lengths: the texts of {name} have lengths of their own: give it a command without")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


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
        raise UnusableError(f"--lengths {length}: the texts of {name} have whole thousands of tokens: 1k, 2k, 4k, 1M")
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

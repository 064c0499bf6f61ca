"""Find and load the tasks of lm-evaluation-harness that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from dist_mem.config.check import nearest
from dist_mem.errors import UnusableError, run_error


def load_tasks(names: Sequence[str], folder: Path | None) -> TaskDict:
    """Load tasks, groups and tags by name or pattern (`mmlu_*`), with few-shot examples as the harness's own command.

    Args:
        folder: with YAML files of further tasks. If it has all of `names`, the harness's own thousands of tasks, whose
            index takes seconds, are not looked at.

    Raises:
        UnusableError: there is no such task, or its file or its data are wrong.
        UnfitError: its data cannot be fetched now.
    """
    if not names:
        raise UnusableError("--tasks is empty: give the names of tasks, separated by commas")
    manager = TaskManager(include_path=folder, include_defaults=False)
    if folder is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=folder)
    found: list[str] = []
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            raise UnusableError(_unknown(name, folder, manager.all_tasks))
        found += [match for match in matches if match not in found]
    try:
        loaded = manager.load(found)
    except Exception as error:  # of the harness, the library of the data, or the task's own program
        text = f"--tasks {','.join(names)} cannot be loaded: {type(error).__name__}: {error}"
        passes = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        raise (run_error(error, text) if passes else UnusableError(text)) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _unknown(name: str, folder: Path | None, known: Sequence[str]) -> str:
    close = nearest(name, known)
    meant = f"; did you mean {close}?" if close else ""
    if folder is None:
        return f"--tasks {name}: the harness has no such task{meant or '; give the folder of your own: --include-path'}"
    why = "; a file there is passed over if it is not valid YAML or has no entry `task`"
    return f"--tasks {name}: neither {folder} nor the harness has such a task{meant}{why}"

"""The lm-eval command: run tasks of lm-evaluation-harness on a trained model.

    dist-mem lm-eval runs/demo --tasks lambada_openai,arc_easy --limit 100
    dist-mem lm-eval runs/demo --tasks questions --include-path my_tasks eval.batch_size=32

It runs in one process, and writes RUN/evaluations/lm_eval/<tasks>-step-<step>.json; the scores are added to the run in
MLflow, except those of an export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lm_eval
from jinja2 import TemplateError
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict

from dist_mem.config.check import nearest
from dist_mem.errors import EXIT_DONE, UnusableError, run_error
from dist_mem.evaluation.export_transformers import write_tokenizer
from dist_mem.evaluation.job import describe_evaluation, track
from dist_mem.evaluation.report_names import FOLDER, ReportName, join_parts
from dist_mem.lm_eval.model import DistMemLM, OpenRun, open_run, read_generation
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.terminal import table

FORMAT_VERSION = 1
_KEPT = ("results", "groups", "group_subtasks", "n-shot", "n-samples", "versions", "higher_is_better", "configs")
_MAX_NAMES = 100  # characters of the tasks in the name of a file


@dataclass(frozen=True)
class LmEvalRequest:
    """The arguments of the command."""

    run: Path
    overrides: Sequence[str]
    tasks: Sequence[str]
    include_path: Path | None = None  # folder with YAML files of further tasks
    metadata: Mapping[str, Any] = field(default_factory=dict)  # for tasks that make their data
    limit: int | None = None  # documents per task
    output: Path | None = None  # a second file to write
    checkpoint: int | None = None


class Score(NamedTuple):
    """One metric of a task or of a group of tasks."""

    task: str
    metric: str  # with the name of the filter, if it is not "none"
    value: float
    stderr: float | None  # None: not known
    num_documents: int | None  # None: of a group that does not count them


def run(request: LmEvalRequest) -> int:
    """Run the command and return the exit code of the process.

    Raises:
        UnusableError: the model, a task or a path is unusable; the message names it.
        UnfitError: the machine cannot do it now, as when the data of a task cannot be fetched.
    """
    if request.include_path is not None and not request.include_path.is_dir():
        raise UnusableError(f"--include-path {request.include_path}: there is no such folder; give one with YAML files")
    opened = open_run(request.run, request.overrides, request.checkpoint)
    with TemporaryDirectory() as folder:
        tasks = _open_tasks(request, opened, Path(folder))
        try:
            results = evaluate(DistMemLM(opened.trained), tasks, limit=request.limit, log_samples=False)
            assert results is not None, "there is one process"
            _publish(request, opened, results)
        except (OSError, TemplateError, ValueError) as error:  # templates, unsafe code, a word without a token, a disk
            raise run_error(error) from error
    return EXIT_DONE


def _open_tasks(request: LmEvalRequest, opened: OpenRun, folder: Path) -> TaskDict:
    """Load the tasks, and refuse what they ask of a generation that is not done here.

    Tasks that make their data by length, as RULER's, open a tokenizer by its folder: the model's, in `folder`, unless
    the metadata name another.
    """
    trained, metadata, remark = opened.trained, dict(request.metadata), ""
    if "tokenizer" not in metadata:
        try:
            adds_bos = not trained.config.data.blocks
            write_tokenizer(
                trained.tokenizer, folder, adds_bos=adds_bos, purpose="a task that makes its data by length"
            )
            metadata["tokenizer"] = str(folder)
        except ValueError as error:
            remark = f"; it gets no tokenizer ({error}): --metadata '{{\"tokenizer\": FOLDER}}' names one"
    loaded = load_tasks(request.tasks, request.include_path, metadata=metadata, remark=remark)
    for name, task in loaded["tasks"].items():
        if "tokenizer" not in request.metadata:
            task.config.metadata.pop("tokenizer", None)  # from the report: the folder does not last
        if task.OUTPUT_TYPE == "generate_until":
            _check_generation(name, task.config.generation_kwargs)
    return loaded


def _check_generation(task: str, options: Mapping[str, Any]) -> None:
    """Raise UnusableError, with the name of the task, as `read_generation`."""
    try:
        read_generation(options)
    except UnusableError as error:
        raise UnusableError(f"--tasks {task}: {error}") from error


def _publish(request: LmEvalRequest, opened: OpenRun, results: Mapping[str, Any]) -> None:
    """Print the scores, write the file, and add both to the run in MLflow."""
    checkpoint, config = opened.trained.checkpoint, opened.trained.config
    scores = list(scores_of(results))
    print(f"{checkpoint.directory}, lm_eval {lm_eval.__version__}, {opened.protocol}")
    print(to_table(scores))
    content = {
        "format_version": FORMAT_VERSION,
        **describe_evaluation(checkpoint, config.name, opened.protocol),
        "lm_eval": lm_eval.__version__,
        "limit": request.limit,
        **{key: results[key] for key in _KEPT if key in results},
    }
    limit = "" if request.limit is None else f"limit{request.limit}"
    name = ReportName(_join_names(request.tasks), checkpoint.manifest["step"], join_parts(limit, opened.tag))
    path = checkpoint.run_dir / FOLDER / "lm_eval" / f"{name}.json"
    for target in (path, *([request.output] if request.output else [])):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json_text(content, indent=1, default=str) + "\n")
    tag = join_parts("lm_eval", limit, opened.tag)
    metrics = {f"{tag}/{score.task}/{score.metric}": score.value for score in scores}
    track(checkpoint, config.tracking, metrics, [path], request.overrides)


def scores_of(results: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the scores of all tasks and groups in results of the harness, whose keys are METRIC,FILTER."""
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else f"{metric}.{chosen}"
            known = stderr if isinstance(stderr, int | float) else None
            yield Score(task, name, float(value), known, values.get("sample_len"))


def to_table(scores: Sequence[Score]) -> str:
    """Return the scores as a table for a terminal."""
    rows = [("task", "metric", "value", "stderr", "documents")]
    for score in scores:
        stderr = "n/a" if score.stderr is None else f"{score.stderr:.4f}"
        documents = "" if score.num_documents is None else f"{score.num_documents:,}"
        rows.append((score.task, score.metric, f"{score.value:,.4f}", stderr, documents))
    return "\n".join(table(rows))


def _join_names(names: Sequence[str]) -> str:
    """Return the names of the tasks as part of a file name; a digest stands for what is too long."""
    joined = "+".join(names).replace("/", "_")
    if len(joined) <= _MAX_NAMES:
        return joined
    return f"{joined[: _MAX_NAMES - 9]}-{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


def load_tasks(
    names: Sequence[str], folder: Path | None, *, metadata: Mapping[str, Any] | None = None, remark: str = ""
) -> TaskDict:
    """Load tasks, groups and tags by name or pattern (`mmlu_*`), with few-shot examples as the harness's own command.

    Args:
        folder: with YAML files of further tasks. If it has all of `names`, the harness's own thousands of tasks, whose
            index takes seconds, are not looked at.
        metadata: what tasks that make their data are given.
        remark: added to the message of a task that has no tokenizer.

    Raises:
        UnusableError: there is no such task, or its file or its data are wrong.
        UnfitError: its data cannot be fetched now.
    """
    if not names:
        raise UnusableError("--tasks is empty: give the names of tasks, separated by commas")
    given = dict(metadata or {})
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=given)
    if folder is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=folder, metadata=given)
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
        text += remark if "tokenizer" in str(error).lower() else ""
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

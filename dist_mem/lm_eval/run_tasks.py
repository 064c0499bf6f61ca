"""The lm-eval command: run tasks of lm-evaluation-harness on a trained model.

    dist-mem lm-eval runs/demo --tasks lambada_openai,arc_easy --limit 100
    dist-mem lm-eval runs/demo --tasks questions --include-path my_tasks eval.batch_size=32
    dist-mem lm-eval runs/demo --tasks ruler,babilong_longctx --lengths 4k,16k,64k

It runs in one process, and writes RUN/evaluations/lm_eval/<tasks>-step-<step>.json, with `--lengths` one for each
length and a table of all; the scores are added to the run in MLflow, except those of an export. Tasks are loaded as by
the harness's own command, with its seeds, so their prompts are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lm_eval
from jinja2 import TemplateError
from lm_eval.evaluator import evaluate
from lm_eval.tasks.manager import TaskDict

from dist_mem.errors import EXIT_DONE, UnusableError, run_error
from dist_mem.evaluation.export_transformers import write_tokenizer
from dist_mem.evaluation.job import describe_evaluation, track
from dist_mem.evaluation.report_names import FOLDER, ReportName, digest_part, join_parts
from dist_mem.lm_eval.answers import AnswerLog
from dist_mem.lm_eval.model import DistMemLM, OpenRun, open_run, read_generation
from dist_mem.lm_eval.tasks import RandomStates, load_tasks, read_copies
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import NO_FIGURE, json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.locks import hold_file
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
    lengths: Sequence[int] = ()  # in tokens, for tasks whose texts have a length; none: as the tasks say
    datasets: Path | None = None  # folder of copies of datasets, each at OWNER/NAME
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
    _check(request)
    opened = open_run(request.run, request.overrides, request.checkpoint)
    try:
        _run_tasks(request, opened)
    # of templates, unsafe code, a word without a token, a disk, a run that others alone may write into
    except (OSError, TemplateError, ValueError) as error:
        raise run_error(error) from error
    return EXIT_DONE


def _run_tasks(request: LmEvalRequest, opened: OpenRun) -> None:
    model, logs, tables = DistMemLM(opened.trained), list[AnswerLog](), []
    lengths: Sequence[int | None] = request.lengths or [None]
    with TemporaryDirectory() as folder, ExitStack() as held:
        for length in lengths:  # another command would answer the same requests, and remove these answers
            held.enter_context(hold_file(_report_path(request, opened, length)))
        waiting = []  # all are opened before the first answer: one may have no texts of a later length
        with read_copies(request.datasets):
            for length in lengths:
                tasks = _open_tasks(request, opened, Path(folder), length)
                waiting.append((tasks, RandomStates.now()))
        for length in lengths:
            tasks, states = waiting.pop(0)
            states.restore()  # as if nothing had been opened since
            path = _report_path(request, opened, length)
            with AnswerLog(path.with_suffix(".answers.jsonl"), _settings(request, opened)) as model.answers:
                results = evaluate(model, tasks, limit=request.limit, log_samples=False)
            assert results is not None, "there is one process"
            logs.append(model.answers)
            tables.append(_publish(request, opened, results, path, length))
        _end(request, opened, tables, logs)


def _end(request: LmEvalRequest, opened: OpenRun, tables: Sequence[Sequence[Score]], logs: Sequence[AnswerLog]) -> None:
    """Write the table of several lengths, and remove the answers, of which the reports have all.

    Not before: the same command, if stopped at a later length, has those of the earlier ones.
    """
    if len(tables) > 1:
        path = _report_path(request, opened, "-".join(map(str, request.lengths))).with_suffix(".csv")
        rows = by_length(tables, request.lengths)
        write_text(path, csv_text(rows))
        print("\n".join(table(rows)), f"written: {path}", sep="\n")
    for log in logs:
        log.remove()


def _check(request: LmEvalRequest) -> None:
    """Raise UnusableError for arguments that cannot be meant."""
    for option, folder in (("--include-path", request.include_path), ("--datasets", request.datasets)):
        if folder is not None and not folder.is_dir():
            raise UnusableError(f"{option} {folder}: there is no such folder")
    if request.output is not None and len(request.lengths) > 1:
        raise UnusableError("--output takes the results of one length: every length has its own file in RUN")
    if request.lengths and "max_seq_lengths" in request.metadata:
        raise UnusableError("--lengths and --metadata both give max_seq_lengths: leave one out")


def _open_tasks(request: LmEvalRequest, opened: OpenRun, folder: Path, length: int | None) -> TaskDict:
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
    loaded = load_tasks(request.tasks, request.include_path, metadata=metadata, length=length, remark=remark)
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


def _report_path(request: LmEvalRequest, opened: OpenRun, length: int | str | None) -> Path:
    """Return where the report of the tasks at a length, or at several, is written."""
    checkpoint = opened.trained.checkpoint
    tag = join_parts(*_parts(request, length), opened.tag)
    name = ReportName(_join_names(request.tasks), checkpoint.manifest["step"], tag)
    return checkpoint.run_dir / FOLDER / "lm_eval" / f"{name}.json"


def _parts(request: LmEvalRequest, length: int | str | None) -> list[str]:
    folders = {"tasks": request.include_path, "datasets": request.datasets}  # tasks and data of the same names
    return [
        "" if length is None else f"length{length}",
        *(f"{name}_{digest_part(str(folder.resolve()))}" for name, folder in folders.items() if folder is not None),
        f"metadata_{digest_part(json_text(request.metadata))}" if request.metadata else "",
        "" if request.limit is None else f"limit{request.limit}",
    ]


def _settings(request: LmEvalRequest, opened: OpenRun) -> dict[str, Any]:
    """Return what the answers to requests depend on, beside their texts."""
    checkpoint = opened.trained.checkpoint
    return {
        "format_version": FORMAT_VERSION,
        **describe_evaluation(checkpoint, opened.trained.config.name, opened.protocol),
        "weights": hashlib.sha256(json_text(checkpoint.manifest["files"]).encode()).hexdigest(),
        "overrides": list(request.overrides),
    }


def _publish(
    request: LmEvalRequest, opened: OpenRun, results: Mapping[str, Any], path: Path, length: int | None
) -> list[Score]:
    """Print the scores, write the file, and add both to the run in MLflow; return the scores."""
    checkpoint, config = opened.trained.checkpoint, opened.trained.config
    scores = scores_of(results)
    at = "" if length is None else f", texts of {length:,} tokens"
    print(f"{checkpoint.directory}, lm_eval {lm_eval.__version__}, {opened.protocol}{at}")
    print(to_table(scores))
    content = {
        "format_version": FORMAT_VERSION,
        **describe_evaluation(checkpoint, config.name, opened.protocol),
        "lm_eval": lm_eval.__version__,
        "length": length,
        "limit": request.limit,
        **{key: results[key] for key in _KEPT if key in results},
    }
    for target in (path, *([request.output] if request.output else [])):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json_text(content, indent=1, default=str) + "\n")
    tag = join_parts("lm_eval", *_parts(request, length), opened.tag)
    metrics = {f"{tag}/{score.task}/{score.metric}": score.value for score in scores}
    track(checkpoint, config.tracking, metrics, [path], request.overrides)
    return scores


def scores_of(results: Mapping[str, Any]) -> list[Score]:
    """Return the scores of all tasks and groups in results of the harness, whose keys are METRIC,FILTER.

    A metric of RULER is named by a length, and is -1 if no text has it, then left out; its group has the metric of one
    length only, so that of others is the mean of its tasks, as the harness computes that one.
    """
    scores: list[Score] = []
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            is_score = comma and not metric.endswith("_stderr") and isinstance(value, int | float)
            if not is_score or (metric.isdecimal() and value == -1):
                continue
            stderr = values.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else f"{metric}.{chosen}"
            known = stderr if isinstance(stderr, int | float) else None
            scores.append(Score(task, name, float(value), known, values.get("sample_len")))
    for group, members in results.get("group_subtasks", {}).items():
        for length in dict.fromkeys(score.metric for score in scores if score.metric.isdecimal()):
            of = {score.task: score.value for score in scores if score.metric == length}
            if members and group not in of and of.keys() >= set(members):
                scores.append(Score(group, length, fmean(of[task] for task in members), None, None))
    return scores


def by_length(tables: Sequence[Sequence[Score]], lengths: Sequence[int]) -> list[list[str]]:
    """Return a table of the scores at several lengths, its header first: a row for each task and metric."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for length, scores in zip(lengths, tables, strict=True):
        for score in scores:
            metric = "score" if score.metric == str(length) else score.metric
            found.setdefault((score.task, metric), {})[length] = score.value
    header = ["task", "metric", *map(str, lengths)]
    return [header, *([*names, *(_cell(values.get(length)) for length in lengths)] for names, values in found.items())]


def _cell(value: float | None) -> str:
    return NO_FIGURE if value is None else f"{value:.4f}"


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

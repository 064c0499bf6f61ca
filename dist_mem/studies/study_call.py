"""The runs of one call of a command: build data, train, evaluate; several at a time, stopped with it, started again."""

from __future__ import annotations

import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.config import DataConfig
from dist_mem.data.directory import check_split
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import INDEX_NAME
from dist_mem.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.launch.status import last_end
from dist_mem.runtime.children import start, watch
from dist_mem.runtime.environment import with_environment
from dist_mem.runtime.files import open_regular
from dist_mem.runtime.processes import own_command
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.budget import Costs
from dist_mem.studies.cells import CellRun, define, finish, give, is_finished, keep_result, read_result
from dist_mem.studies.definition import Settings
from dist_mem.studies.runs import (
    check_trained,
    columns_to_measure,
    data_block,
    definition_of,
    evaluate_command,
    newest_report,
    result_of,
    train_command,
)
from dist_mem.studies.study import Column, Study

DEVICES = "CUDA_VISIBLE_DEVICES"  # of the commands of a run; without it, those of this process
_PAUSE = 1.0  # seconds before another start
_PROGRESS = 30.0  # seconds between two lines of a training
_TAIL = 4096  # bytes of a log that have its newest line
_building = threading.Lock()  # runs at the same time may share their data


class CommandError(RuntimeError):
    """A command of the study has failed; its output is in its log."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


RunFailure = CommandError | UnusableError | OSError  # ends one run of a study, and none of the others


class StudyStoppedError(Exception):
    """A signal was received; the running command has received it, saved and ended."""


Place = Mapping[str, str]  # what one of several runs at a time has of the machine: variables of the environment

# What is done for a run, with a function that reports.
RunAction = Callable[[CellRun, Callable[[str], None], Place], None]


@dataclass
class StudyCall:
    """The state of one call of the command."""

    study: Study
    out: Path
    runs: list[CellRun]
    ranks: int
    extra: list[str]  # overrides for every training and evaluation
    signal: StopSignal
    cells: Path | None = None  # a folder of finished cells, beside the study's own
    has_intervals: bool = True  # so that cells keep the scores of every document
    made: dict[str, str] = field(default_factory=dict)  # where and when, for the cells
    costs: dict[str, Costs] = field(default_factory=dict)  # of every row, if the study has a budget
    environment: dict[str, str] = field(default_factory=dict)

    def check_signal(self) -> None:
        """Raise StudyStoppedError if a signal was received: between two commands, nothing else acts on one."""
        if self.signal.received:
            raise StudyStoppedError

    def command(
        self,
        arguments: Sequence[str],
        log: str,
        *,
        also: Sequence[int] = (),
        place: Place = MappingProxyType({}),
        until: Callable[[], bool] = lambda: False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> int:
        """Run a command with its output in a separate log, and forward a signal to it. Returns its exit code.

        Args:
            until: asked twice a second; once it returns True, the command is stopped as by a signal.
            progress: called every half minute with the newest line of the log, if it is a new one.

        Raises:
            StudyStoppedError: a signal was received.
            CommandError: the command failed, and its exit code is not in `also`.
        """
        path = self.out / "logs" / f"{log}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(path, "ab") as stream:
            stream.write(f"{shlex.join(arguments)}\n".encode())
            stream.flush()
            shown, due = "", time.monotonic() + _PROGRESS

            def is_stopping() -> bool:
                nonlocal shown, due
                if time.monotonic() >= due:
                    due += _PROGRESS
                    if (line := _newest_line(path)) != shown:
                        progress(shown := line)
                return self.signal.received is not None or until()

            environment = with_environment({**self.environment, **place})
            code = watch(start(arguments, stream, environment), is_stopping)
        self.check_signal()
        if code not in (EXIT_DONE, *also):
            raise CommandError(f"{shlex.join(arguments)}: exit code {code}; see {path}", code)
        return code


def _newest_line(log: Path) -> str:
    """Return the last line with text of a log, of those that have ended."""
    with open_regular(log) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
        lines = stream.read().decode(errors="replace").split("\n")[:-1]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def places(jobs: int, ranks: int, *, num_cores: int, gpus: Sequence[str]) -> list[Place]:
    """Divide the machine among runs at the same time: an even share of cores, and GPUs of their own.

    Args:
        gpus: their names in CUDA_VISIBLE_DEVICES.

    Raises:
        UnusableError: there are GPUs, but fewer than ranks.
    """
    if jobs == 1:
        return [{}]
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores // (jobs * ranks)))}
    if not gpus:
        return [threads] * jobs
    if jobs * ranks > len(gpus):
        raise UnusableError(
            f"--jobs {jobs} with --ranks {ranks} takes {jobs * ranks} GPUs, but here are {len(gpus)}: give fewer"
        )
    own = [",".join(gpus[job * ranks : (job + 1) * ranks]) for job in range(jobs)]
    return [{**threads, DEVICES: names} for names in own]


def for_each_run(
    job: StudyCall, runs: Sequence[CellRun], places: Sequence[Place], step: RunAction, *, restarts: int
) -> list[RunFailure]:
    """Call `step` for every run, one at a time in each place, and return the errors of those that failed.

    Args:
        restarts: further starts of a run whose command died. Wrong input (exit code 2) is not started again.

    Raises:
        StudyStoppedError: a signal was received, and all running commands have ended.
    """
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def attempt(number: int, item: CellRun) -> RunFailure | None:
        def report(text: str) -> None:
            print(f"[{number}/{len(runs)}] {text}", flush=True)

        place = free.get()
        try:
            for left in range(restarts, -1, -1):
                job.check_signal()
                try:
                    step(item, report, place)
                    return None
                except (CommandError, UnusableError, OSError) as error:  # the last of a full disk, for example
                    if left == 0 or not isinstance(error, CommandError) or error.code == EXIT_USAGE:
                        report(f"{item.name}: failed")
                        return error
                    report(f"{item.name}: ended with exit code {error.code}; it is started again")
                    time.sleep(_PAUSE)
            return None
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as threads:
        futures = [threads.submit(attempt, number, item) for number, item in enumerate(runs, start=1)]
    found = [future.result() for future in futures]  # a StudyStoppedError is raised here, after all have ended
    return list({str(error): error for error in found if error is not None}.values())


def columns_left(job: StudyCall, item: CellRun) -> dict[str, Column]:
    """Return the columns of a run that have no result yet. Raises UnusableError for one of another definition."""
    left = {}
    for name, column in columns_to_measure(job.study, item).items():
        result = read_result(item, name)
        if result is None:
            left[name] = column
        elif result.get("column", asdict(column)) != asdict(column):
            raise UnusableError(
                f"{item.cell}: column {name!r} was {result['column']} and is {asdict(column)}; "
                "give another --out or --cells, or another name"
            )
    return left


def run_one(job: StudyCall, item: CellRun, report: Callable[[str], None], place: Place) -> None:
    """Build, train and evaluate, except for finished steps.

    Raises:
        StudyStoppedError, CommandError: as `StudyCall.command`.
        UnusableError: the data are missing.
    """
    missing = columns_left(job, item)
    if missing:
        _train_and_measure(job, item, missing, report, place)
    else:
        report(f"{item.name}: already done")
    if not is_finished(item):
        finish(item, **job.made)
    if job.cells is not None:
        give(item, job.cells, definition_of(job.study, item, job.extra))


def _train_and_measure(
    job: StudyCall, item: CellRun, missing: Mapping[str, Column], report: Callable[[str], None], place: Place
) -> None:
    build(job, item, report)
    definition = begin(job, item)
    report(f"{item.name}: training")
    command = train_command(job.study, item, ranks=job.ranks, extra=job.extra, devices=place.get(DEVICES))

    def progress(line: str) -> None:
        report(f"{item.name}: {line}")

    code = job.command(command, f"{item.name}-train", also=[EXIT_DIVERGED], place=place, progress=progress)
    check_trained(job.study, item, job.extra, definition)  # a file may have been edited before the training read it
    if code == EXIT_DIVERGED:
        _keep_diverged(item, missing, f"logs/{item.name}-train.txt", report)
    while left := [name for name in missing if read_result(item, name) is None]:
        for name, value in _measure(job, item, missing, left[0], place).items():
            report(f"{item.name}: {name} {'n/a' if value is None else f'{value:.4g}'}")


def keep_if_diverged(job: StudyCall, item: CellRun, report: Callable[[str], None]) -> None:
    """Give the cell of a run that has diverged in a job of Slurm its results."""
    end = last_end(item.directory)
    if end is not None and end["exit_code"] == EXIT_DIVERGED and read_finished(item.directory) is None:
        _keep_diverged(item, columns_left(job, item), f"{item.directory}/slurm/{end['job']}", report)


def _keep_diverged(item: CellRun, missing: Mapping[str, Column], where: str, report: Callable[[str], None]) -> None:
    for name, column in missing.items():
        keep_result(item, name, {"diverged": f"see {where}", "column": asdict(column)})
        report(f"{item.name}: {name} diverged")


def begin(job: StudyCall, item: CellRun) -> Settings:
    """Begin the cell of a run whose data are built; return its definition.

    Raises:
        UnusableError: a cell or a training that is there is of another definition.
    """
    definition = definition_of(job.study, item, job.extra)
    check_trained(job.study, item, job.extra, definition)
    define(item, definition)
    return definition


def build(job: StudyCall, item: CellRun, report: Callable[[str], None]) -> None:
    """Build the data of a run if they are missing. Raises UnusableError if the study cannot build them."""
    data, point = data_block(job.study, item, job.extra), job.study.points[item.point]
    if is_remote(data.path):
        return
    path, is_own = Path(data.path), data.path == data_block(job.study, item).path  # else the command names it
    splits = {column.split for column in columns_to_measure(job.study, item).values()}
    if not data.mixture:
        splits.add(data.train_split)

    def is_built() -> bool:
        return all((path / split / INDEX_NAME).exists() for split in splits)  # a builder writes them last

    with _building:
        if is_built():
            return
        if point.build and is_own:
            report(f"building {path}")
            for command in point.build:
                # The words of the user's file run as in a shell, also a script that imports what is beside it.
                job.command(own_command(command), f"build-{path.name}", place={"PYTHONSAFEPATH": ""})
        if not is_built():
            for split in sorted(splits):
                check_split(DataConfig(path=str(path)), split)  # a column may name one that no builder makes
            how = f"build it with: {point.made_by}" if point.made_by and is_own else "`dist-mem data --help` shows how"
            raise UnusableError(f"{path} is missing, and the table cannot build it; {how}")


def _measure(
    job: StudyCall, item: CellRun, columns: Mapping[str, Column], name: str, place: Place
) -> dict[str, float | None]:
    """Run the command of a column, and store its metric and those of other columns with the same command."""
    first = columns[name]
    job.command(evaluate_command(item, first, job.extra), f"{item.name}-{name}", place=place)
    report = newest_report(item, first)
    values: dict[str, float | None] = {}
    for other, column in same_command(columns, first).items():
        result = result_of(report, column)
        values[other] = result.get("value")  # None if a requirement is missing, as WordNet for METEOR
        has_scores = job.has_intervals and column.command == "evaluate"
        keep_result(item, other, {**result, "column": asdict(column)}, report if has_scores else None)
    return values


def same_command(columns: Mapping[str, Column], first: Column) -> dict[str, Column]:
    """Return the columns whose metrics one command measures together with the first."""
    return {
        name: column
        for name, column in columns.items()
        if replace(column, metric=first.metric, band=first.band) == first
    }

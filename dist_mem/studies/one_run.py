"""One run of a table: build its data, train, evaluate; finished steps are not repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_mem.config import DataConfig
from dist_mem.data.directory import check_split
from dist_mem.data.shard import INDEX_NAME
from dist_mem.errors import EXIT_DIVERGED, UnusableError
from dist_mem.studies.job import Job, Place
from dist_mem.studies.runs import (
    Run,
    build_command,
    data_of,
    evaluate_command,
    figure_of,
    keep_result,
    measured,
    newest_report,
    read_result,
    train_command,
)
from dist_mem.studies.tables import Column

_building = threading.Lock()  # runs at the same time may share their data


def left_to_measure(job: Job, item: Run) -> dict[str, Column]:
    """Return the columns of a run that have no result yet."""
    columns = measured(job.table, job.scale, item)
    return {name: column for name, column in columns.items() if read_result(item, name) is None}


def run_one(job: Job, item: Run, report: Callable[[str], None], place: Place) -> None:
    """Build, train and evaluate, except for finished steps.

    Raises:
        StoppedError, CommandError: as `Job.command`.
        UnusableError: the data are missing.
    """
    missing = left_to_measure(job, item)
    if not missing:
        report(f"{item.name}: already done")
        return
    build(job, item, report)
    report(f"{item.name}: training")
    command = train_command(job.scale, item, ranks=job.ranks, extra=job.extra, devices=place.devices)
    code = job.command(command, f"{item.name}-train", also=[EXIT_DIVERGED], place=place)
    for name in missing if code == EXIT_DIVERGED else ():
        keep_result(item, name, {"diverged": f"see logs/{item.name}-train.txt"})
        report(f"{item.name}: {name} diverged")
    while left := [name for name in missing if read_result(item, name) is None]:
        for name, value in _measure(job, item, missing, left[0], place).items():
            report(f"{item.name}: {name} {'n/a' if value is None else f'{value:.4g}'}")


def build(job: Job, item: Run, report: Callable[[str], None]) -> None:
    """Build the data of a run if they are missing. Raises UnusableError if the table cannot build them."""
    path, point = Path(data_of(job.scale, item)), job.scale.points[item.point]
    splits = {"train", *(column.split for column in measured(job.table, job.scale, item).values())}

    def is_built() -> bool:
        return all((path / split / INDEX_NAME).exists() for split in splits)  # a builder writes them last

    with _building:
        if is_built():
            return
        if point.build:
            report(f"building {path}")
            for command in point.build:
                # The words of the user's file run as in a shell, also a script that imports what is beside it.
                job.command(build_command(command), f"build-{path.name}", place=Place({"PYTHONSAFEPATH": ""}))
        if not is_built():
            for split in sorted(splits):
                check_split(DataConfig(path=str(path)), split)  # a column may name one that no builder makes
            how = f"build it with: {point.made_by}" if point.made_by else f"see {job.table.source}"
            raise UnusableError(f"{path} is missing, and the table cannot build it; {how}")


def _measure(job: Job, item: Run, columns: Mapping[str, Column], name: str, place: Place) -> dict[str, float | None]:
    """Run the command of a column, and store its figure and those of other columns with the same command."""
    first = columns[name]
    job.command(evaluate_command(item, first, job.extra), f"{item.name}-{name}", place=place)
    report = newest_report(item, first)
    values: dict[str, float | None] = {}
    for other, column in same_command(columns, first).items():
        value, step = figure_of(report, column)
        values[other] = value  # None if a requirement is missing, as WordNet for METEOR
        result: dict[str, Any] = {"absent": f"{column.split}/{column.figure}"} if value is None else {"value": value}
        result |= {"step": step, "evaluate": list(column.evaluate)}
        if column.command == "evaluate":
            result["report"] = str(report.relative_to(item.directory))
        keep_result(item, other, result)
    return values


def same_command(columns: Mapping[str, Column], first: Column) -> dict[str, Column]:
    """Return the columns whose figures one command measures together with the first."""
    return {
        name: column
        for name, column in columns.items()
        if replace(column, figure=first.figure, band=first.band) == first
    }

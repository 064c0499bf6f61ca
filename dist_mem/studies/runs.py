"""The runs of a study, their commands and their results.

Every step is a command that a user can run, in a separate process. The files of a step show that it is finished, so a
repeated call continues where an earlier one stopped. A row with `best_of` shows the best of other rows on the
validation split, as a paper tunes its baselines: chosen per seed and column, with the metric of the column's split.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.resume_source import read_saved_config
from dist_mem.config import DataConfig, load_block, load_config
from dist_mem.data.directory import open_index
from dist_mem.data.mixture import source_settings
from dist_mem.data.shard import INDEX_NAME
from dist_mem.errors import UnusableError
from dist_mem.evaluation.report_names import list_reports
from dist_mem.evaluation.scores import Band, read_report
from dist_mem.memory import memory_options
from dist_mem.memory.outside import sources
from dist_mem.runtime.children import launcher
from dist_mem.runtime.figures import is_figure
from dist_mem.runtime.file_schema import check, integer, metric, optional, read_json, record, table
from dist_mem.studies.cells import CELLS, CellRun, manifest_of, read_result
from dist_mem.studies.definition import Settings, compare, settings_of
from dist_mem.studies.study import Column, Study

# Metrics of which a higher one is better; of all others a lower one is.
_GROWING = re.compile("accuracy|whole_answers|_(f1|rouge1|rougeL|meteor)$")
BITS = "bits_per_byte"


def all_runs(study: Study, out: Path, seeds: Sequence[int] = (), rows: Collection[str] = ()) -> list[CellRun]:
    """Return the runs of a study, seed by seed, so that the table is complete as early as possible.

    Args:
        seeds: empty: those of the study.  rows: empty: all.
    """
    return [
        CellRun(row, name, seed, out)
        for seed in seeds or study.seeds
        for name, point in study.points.items()
        for row in study.trained_rows
        if row in (rows or study.trained_rows) and row not in point.without
    ]


def data_block(study: Study, run: CellRun, extra: Sequence[str] = ()) -> DataConfig:
    """Return the settings of a run's data; no other block is checked, as a budget sets some of their keys later."""
    return load_block(DataConfig, "data", train_words(study, run, extra))


def _data_of(study: Study, run: CellRun) -> str:
    """Return the data directory of a run: the `data.path=` of its row, else its point's."""
    paths = [word.partition("=")[2] for word in study.trained_rows[run.row] if word.startswith("data.path=")]
    return paths[-1] if paths else study.points[run.point].data


def with_done(study: Study, out: Path, requested: Sequence[CellRun]) -> list[CellRun]:
    """Return the requested runs and all others that earlier calls measured, since the table shows them too."""
    found = [re.search(r"seed(\d+)$", path.stem) for path in (out / CELLS).glob("*.json")]
    seeds = sorted({run.seed for run in requested} | {int(match[1]) for match in found if match})
    return [run for run in all_runs(study, out, seeds) if run in requested or is_measured(study, run)]


def is_measured(study: Study, run: CellRun) -> bool:
    """Return whether a run has any result."""
    return any(read_result(run, name) is not None for name in columns_at(study, run.point))


def columns_at(study: Study, point: str) -> dict[str, Column]:
    """Return the columns measured at one point."""
    return {name: column for name, column in study.columns.items() if column.point == point}


def rows_behind(study: Study, row: str, point: str | None = None) -> list[str]:
    """Return the rows that are run for a row of the table: itself, or those it is the best of.

    Args:
        point: return only the rows run at this point; None: all.
    """
    without = [] if point is None else study.points[point].without
    return [name for name in study.rows[row].best_of or [row] if name in study.trained_rows and name not in without]


def shown_rows(study: Study) -> list[str]:
    """Return the rows of the table that have a run."""
    return [row for row in study.rows if rows_behind(study, row)]


def columns_to_measure(study: Study, run: CellRun) -> dict[str, Column]:
    """Return the columns to measure for a run; for a candidate of a `best_of` row also each column on validation."""
    columns = columns_at(study, run.point)
    if run.row not in study.candidates:
        return columns
    return {_on_validation(name): replace(column, split="validation") for name, column in columns.items()} | columns


def runs_behind(study: Study, runs: Sequence[CellRun], row: str, name: str) -> list[CellRun]:
    """Return the runs, one per seed, whose metrics a cell of the table shows."""
    column = study.columns[name]
    behind = rows_behind(study, row, column.point)
    mine = [run for run in runs if run.row in behind and run.point == column.point]
    if not study.rows[row].best_of:
        return mine
    seeds = sorted({run.seed for run in mine})
    return [_best([replace(mine[0], row=other, seed=seed) for other in behind], name, column) for seed in seeds]


def _best(runs: Sequence[CellRun], name: str, column: Column) -> CellRun:
    """Return the best run of one seed, or the first run that is not measured yet, even if it was not requested."""
    results = [read_result(run, _on_validation(name)) for run in runs]
    if None in results:
        return runs[results.index(None)]
    return runs[min(range(len(runs)), key=lambda number: rank_of([results[number]], column.metric))]


def rank_of(results: Sequence[Mapping[str, Any] | None], metric: str) -> tuple[int, float]:
    """Return by what the results of a row's seeds are ranked, the best one least: the mean of their values.

    Where a perplexity is no figure, bits per byte rank alike and come after; what diverged or has neither comes last.
    """
    found = [result or {} for result in results]
    values, bits = ([result[key] for result in found if key in result] for key in ("value", BITS))
    if len(values) == len(found):
        return 0, (-1.0 if is_better_higher(metric) else 1.0) * statistics.fmean(values)
    return (1, statistics.fmean(bits)) if len(values) + len(bits) == len(found) else (2, 0.0)


def is_better_higher(metric: str) -> bool:
    """Return whether a higher value of a metric is the better one."""
    return _GROWING.search(metric) is not None


def _on_validation(name: str) -> str:
    return f"{name} on validation"


def train_command(
    study: Study, run: CellRun, *, ranks: int, extra: Sequence[str], devices: str | None = None
) -> list[str]:
    """Return the command of a training, through a launcher for several ranks; `devices` as in `launcher`."""
    return [*launcher(ranks, devices), "train", *train_words(study, run, extra)]


def train_words(study: Study, run: CellRun, extra: Sequence[str]) -> list[str]:
    """Return the configurations and overrides of a training, for `dist-mem train` or `load_config`."""
    return [
        *(
            *study.train,
            *study.trained_rows[run.row],
            *study.points[run.point].train,
            f"data.path={_data_of(study, run)}",
        ),
        *(f"train.seed={run.seed}", f"data.seed={run.seed}", f"name={run.name}", f"run_dir={run.directory}", *extra),
    ]


def definition_of(study: Study, run: CellRun, extra: Sequence[str]) -> Settings:
    """Return what a run is: its settings, and fingerprints of its memory files and of its splits.

    The splits are left out unless all are built, and the data of a curriculum's earlier stages in any case.
    """
    config = load_config(train_words(study, run, extra), memory_options=memory_options)
    data, measured = config.data, {column.split for column in columns_to_measure(study, run).values()}
    splits = {f"data/{split}": (data, split) for split in sorted({data.train_split, *measured})}
    if data.mixture:  # in place of the training split of data.path
        sources_of = {_of_source(number): (one, one.train_split) for number, one in enumerate(source_settings(data))}
        splits = {f"data/{split}": (data, split) for split in sorted(measured)} | sources_of
    is_built = all((Path(one.path) / split / INDEX_NAME).exists() for one, split in splits.values())
    prints = {name: open_index(*found).fingerprint for name, found in splits.items() if is_built}
    memories = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources(config.memory).items()}
    return {**settings_of(config), **memories, **prints}


def check_trained(study: Study, run: CellRun, extra: Sequence[str], definition: Settings) -> None:
    """Check that a training in the run directory is of this definition.

    A job of Slurm that makes its own copy, as in a container, reads the configuration when it starts, which may be long
    after its cell was begun. Keys such as optimizer.lr may change when a run resumes, and a finished run does not even
    start: without this check the trained model would be measured as one of this definition.

    Raises:
        UnusableError: it is of another definition.
    """
    if not (run.directory / "config.yaml").exists():
        return
    saved = read_saved_config(run.directory, load_config(train_words(study, run, extra)).memory)
    not_saved = {key: value for key, value in definition.items() if "/" in key}
    trained = {**settings_of(saved), **not_saved}
    if manifest := manifest_of(run):
        files = manifest["files"]
        trained |= {name: files[name]["sha256"] for name in files if name.startswith("memory/")}
        *_, last = fingerprints = manifest["data_fingerprint"].split()
        # Of a curriculum, the last stage is that of data.path.
        of_last = {f"data/{saved.data.train_split}": last}
        of_sources = {_of_source(number): one for number, one in enumerate(fingerprints)}
        trained |= of_sources if saved.data.mixture else of_last
    compare(trained, definition, f"{run.directory} is a training", "give another --out, or remove it")


def _of_source(number: int) -> str:
    """Return the name of the fingerprint of a source of a mixture."""
    return f"data/mixture/{number}"


def evaluate_command(run: CellRun, column: Column, extra: Sequence[str]) -> list[str]:
    """Return the arguments of `dist-mem evaluate`, or of the other command that measures the column."""
    overrides = _of_evaluations(extra)
    return [*launcher(1), column.command, str(run.directory), "--split", column.split, *column.evaluate, *overrides]


def _of_evaluations(extra: Sequence[str]) -> list[str]:
    return [text for text in extra if text.startswith(("eval.", "tracking."))]


def figure_commands(study: Study, runs: Sequence[CellRun], out: Path, extra: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of `dist-mem figure` for each figure of the study whose rows are all among the runs."""
    first = {run.row: str(run.directory) for run in reversed(runs)}
    return {
        name: [
            *(*launcher(1), "figure", name, *(first[row] for row in rows)),
            *(*_of_evaluations(extra), "-o", str(out / "figures")),
        ]
        for name, rows in study.figures.items()
        if all(row in first for row in rows)
    }


def newest_report(run: CellRun, column: Column) -> Path:
    """Return the report of the measurement that has just ended.

    Raises:
        ValueError: it has written no report.
    """
    found = list_reports(run.directory, column.command.removeprefix("evaluate"))
    written = [path for path, name in found.items() if name.split == column.split]
    if not written:
        raise ValueError(f"{run.directory} has no report of {column.command} --split {column.split}")
    return max(written, key=lambda path: path.stat().st_mtime_ns)


_METRICS = record({"metrics": table(optional(metric)), "step": integer()}, is_open=True)


def metric_of(path: Path, column: Column) -> tuple[float | None, int]:
    """Return the metric of a column in a report, None if the report has no such metric, and the checkpoint's step."""
    content: dict[str, Any] = read_json(path, UnusableError, "; remove the file")
    check(content, _METRICS, path, UnusableError, "; remove the file")
    value: float | None = content["metrics"].get(f"{column.split}/{column.metric}")
    if band := band_of(column):
        value = getattr(read_report(path), column.metric)(band)
    return (value if value is not None and is_figure(value) else None), int(content["step"])


def band_of(column: Column) -> Band | None:
    """Return the band of a column whose metric has one."""
    return Band(column.band[0], column.band[1] if column.band[1:] else None) if column.band else None


def result_of(path: Path, column: Column) -> dict[str, Any]:
    """Return the result of a column in a report: its value, or what is absent; bits per byte beside a perplexity."""
    value, step = metric_of(path, column)
    if value is not None:
        return {"value": value, "step": step}
    bits, _ = metric_of(path, replace(column, metric=BITS, band=[]))
    in_bits = {BITS: bits} if column.metric in ("word_perplexity", "token_perplexity") and bits is not None else {}
    return {"absent": f"{column.split}/{column.metric}", **in_bits, "step": step}

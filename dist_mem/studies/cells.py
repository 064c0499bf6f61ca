"""The cells of a study: a small JSON file for each of its runs, with all that tables, pictures and intervals need.

A cell says what was run (its settings, and the fingerprints of its data), what was measured (results, and the scores of
every document), how its training went, and where and when. A cell is begun before its training, so that a folder never
mixes runs of different definitions. Finished ones can be kept elsewhere too (`--cells FOLDER`): a study then takes many
sittings and machines, since a call takes over the finished cells of that folder and trains what is missing.

    {"format_version": 1, "definition": {"train.seed": 0, "memory.kind": "none", "data/train": "4f2a...", ...},
     "results": {"perplexity": {"value": 4.0, "step": 100, "report": "test"}}, "reports": {"test": {...}},
     "curve": [[step, loss, learning rate or null], ...], "evaluations": [[step, bits per byte], ...],
     "made": {"tokens_read_per_second": 9000.0, "date": "2026-11-26", ...}}
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.manifest import list_steps, read_manifest, step_dir
from dist_mem.errors import CheckpointError, UnusableError
from dist_mem.evaluation.scores import Report, report_from
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, integer, leaf, metric, optional, read_json, record, table, text
from dist_mem.runtime.files import is_missing, read_regular, write_text
from dist_mem.studies.definition import compare
from dist_mem.tracking.log import METRICS_FILE, read_points

CELLS = "cells"  # folder, in that of a study
FORMAT_VERSION = 1
_SCORE = "/bits_per_byte"  # of an evaluation during a training, after its split
_SPEED = "tokens_read_per_second"  # of tasks of recall, a few tokens are scored
_REMEDY = "; remove the file"
_ANY = leaf("a value", lambda value: True)
_RESULT = record({}, {"value": optional(metric), "step": integer(), "diverged": text, "report": text}, is_open=True)
_CELL = record(
    {"format_version": integer(), "results": table(_RESULT), "reports": table(_ANY)},
    {"definition": table(_ANY), "curve": _ANY, "evaluations": _ANY, "made": table(_ANY)},
    is_open=False,
)


@dataclass(frozen=True)
class CellRun:
    """A training: one row at one point with one seed."""

    row: str
    point: str
    seed: int
    out: Path  # of the study

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.row, self.point, f"seed{self.seed}") if part)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.out / "runs" / self.name

    @property
    def cell(self) -> Path:
        """The file of its cell."""
        return self.out / CELLS / f"{self.name}.json"


def read_cell(path: Path) -> dict[str, Any]:
    """Return the content of a cell, {} if there is none yet. Raises UnusableError if it is no cell."""
    if is_missing(path):
        return {}
    found = path.stat()
    return _read_once(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=32)  # the seeds of a row and its candidates, which every column asks for
def _read_once(path: Path, *_: int) -> dict[str, Any]:
    """Return the content of a cell with this inode, time and size: a table asks for each dozens of times."""
    body: dict[str, Any] = read_json(path, UnusableError, _REMEDY)
    check(body, record({"format_version": integer()}, is_open=True), path, UnusableError, _REMEDY)
    if (version := body["format_version"]) != FORMAT_VERSION:
        raise UnusableError(f"{path}: format_version {version} is not {FORMAT_VERSION}, the one read here{_REMEDY}")
    check(body, _CELL, path, UnusableError, _REMEDY)
    return body


def write_cell(run: CellRun, **changes: Any) -> None:
    """Write a cell with some of its keys changed, and the others as they are."""
    body = {"format_version": FORMAT_VERSION, "results": {}, "reports": {}, **read_cell(run.cell), **changes}
    run.cell.parent.mkdir(parents=True, exist_ok=True)
    lines = (f" {json_text(key)}: {json_text(value)}" for key, value in body.items())
    write_text(run.cell, "{\n" + ",\n".join(lines) + "\n}\n")


def define(run: CellRun, definition: Mapping[str, Any]) -> None:
    """Begin the cell of a run. Raises UnusableError if the one that is there is of another definition."""
    if "definition" not in read_cell(run.cell):
        write_cell(run, definition=definition)
    check_definition(run.cell, definition, f"give another --out, or remove it and its run directory {run.directory}")


def check_definition(path: Path, definition: Mapping[str, Any], remedy: str) -> None:
    """Raise UnusableError if a cell is of another definition, as `compare`."""
    compare(read_cell(path).get("definition", {}), definition, f"{path} is a cell", remedy)


def keep_result(run: CellRun, column: str, result: Mapping[str, Any], report: Path | None = None) -> None:
    """Add a result to a cell, or the reason there is none: {"value": 1.5, "step": 100} or {"diverged": "..."}.

    Args:
        report: of `dist-mem evaluate`, whose scores the cell keeps once, however many results are from it.
    """
    content = read_json(report, UnusableError, _REMEDY) if report else {}
    scores = {key: content[key] for key in ("format_version", "report")} if report else None
    _keep(run, column, {**result, "report": report.stem} if report else result, scores)


def _keep(run: CellRun, column: str, result: Mapping[str, Any], scores: Mapping[str, Any] | None = None) -> None:
    body, facts = read_cell(run.cell), dict(result)
    reports = dict(body.get("reports", {}))
    if scores is not None:
        same = [name for name, other in reports.items() if other == scores]
        facts["report"] = same[0] if same else f"{facts['report']} {len(reports)}"
        reports[facts["report"]] = scores
    write_cell(run, results={**body.get("results", {}), column: facts}, reports=reports)


def read_result(run: CellRun, column: str) -> dict[str, Any] | None:
    """Return what `keep_result` has kept; None if there is no result yet."""
    found: dict[str, Any] | None = read_cell(run.cell).get("results", {}).get(column)
    return found


def report_of(run: CellRun, column: str) -> Report | None:
    """Return the scores of every document behind a result; None if `dist-mem evaluate` has not measured it."""
    body = read_cell(run.cell)
    name = body.get("results", {}).get(column, {}).get("report")
    if name is None:
        return None
    if name not in body["reports"]:
        raise UnusableError(f"{run.cell} is damaged (it has no report {name!r}){_REMEDY}")
    return report_from(body["reports"][name], run.cell)


def manifest_of(run: CellRun) -> dict[str, Any]:
    """Return the manifest of the newest checkpoint of a training; {} without one, or if it is damaged."""
    with suppress(CheckpointError):  # a training passes over a damaged checkpoint
        for step in list_steps(run.directory)[-1:]:
            return read_manifest(step_dir(run.directory, step))
    return {}


def finish(run: CellRun, **made: Any) -> None:
    """Add to a cell how its training went, from its log and its checkpoint, and `made`: where and when."""
    points = read_points(run.directory / METRICS_FILE)
    curve = [
        [point.step, point.metrics["loss"], point.metrics.get("lr")] for point in points if "loss" in point.metrics
    ]
    evaluations = [
        [point.step, value] for point in points for name, value in point.metrics.items() if name.endswith(_SCORE)
    ]
    speeds = [point.metrics[_SPEED] for point in points if _SPEED in point.metrics]
    made |= {_SPEED: statistics.median(speeds)} if speeds else {}
    made |= {"ranks": manifest["world_size"]} if (manifest := manifest_of(run)) else {}
    write_cell(run, curve=curve, evaluations=evaluations, made=made)


def is_finished(run: CellRun) -> bool:
    return "made" in read_cell(run.cell)


def origin_of(run: CellRun) -> dict[str, Any]:
    """Return where and when a finished cell was made; {} of one that is not finished."""
    found: dict[str, Any] = read_cell(run.cell).get("made", {})
    return found


def speed_of(run: CellRun) -> float | None:
    """Return the tokens/s that the training read; None if its log has none."""
    made = origin_of(run)
    return made.get(_SPEED, made.get("tokens_per_second"))  # an older version kept those of the tokens scored


def take_over(run: CellRun, folder: Path, definition: Mapping[str, Any]) -> bool:
    """Take over the finished cell of a folder, of a finished run the results that it lacks; return whether all.

    Raises:
        UnusableError: it, or a column of it, is of another definition.
    """
    there = folder / run.cell.name
    if not there.exists():
        return False
    check_definition(there, definition, "give another --cells, or remove it")
    if is_finished(run):
        mine, theirs = read_cell(run.cell)["results"], read_cell(there)
        for column, facts in theirs["results"].items():
            if column not in mine:
                _keep(run, column, facts, theirs["reports"].get(facts.get("report")))
            elif (was := facts.get("column")) != (now := mine[column].get("column")) and was and now:
                raise UnusableError(f"{there}: column {column!r} is {was} and here {now}; give another --cells or name")
        return False
    run.cell.parent.mkdir(parents=True, exist_ok=True)
    write_text(run.cell, read_regular(there).decode())
    return True


def give(run: CellRun, folder: Path, definition: Mapping[str, Any]) -> None:
    """Copy a finished cell to a folder, with all results of the one there. Raises as `take_over`."""
    take_over(run, folder, definition)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / run.cell.name, read_regular(run.cell).decode())


def checksum(report: Report) -> str:
    """Return the SHA-256 of the metrics of every document, without times and places."""
    # Without depths, which older reports lack.
    metrics = [[*vars(document).values()][:-1] for document in report.documents]
    return hashlib.sha256(json_text(metrics).encode()).hexdigest()

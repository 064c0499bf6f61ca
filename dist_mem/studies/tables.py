"""Definition of a paper's table: its rows, its columns, the paper's figures, and how to run it at each scale.

Each table is a YAML file; the classes here define its keys. Tables of this project are in configs/tables; any other
path works too. A run is one row at one point with one seed. A point is data and settings that the rows share, such as
the sequence length in a figure; most tables have one point.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from dist_mem.config import read_block
from dist_mem.config.check import hint
from dist_mem.errors import UnusableError
from dist_mem.evaluation.report import BANDS, FIGURES
from dist_mem.evaluation.report import RECALL_FIGURES as RECALL
from dist_mem.papers.dialogue.scores import FIGURES as DIALOGUE_FIGURES
from dist_mem.papers.regression_error import FIGURES as REGRESSION_FIGURES
from dist_mem.runtime.shipped import shipped_path
from dist_mem.runtime.terminal import listed

FOLDER = Path("configs") / "tables"
_NAME = re.compile(r"\w[\w .:-]*")  # names of files, and of figures in MLflow, which accepts no others
PAPERS = "paper"  # name of the scale with the paper's data and sizes
SIZES = ("parameters", "multiply_adds")  # of a model; multiply-adds per predicted token in scoring
# Command of dist-mem that measures a trained model -> the figures of its report.
MEASURES = {
    "evaluate": (*FIGURES, *RECALL, *(f"{figure}_{band}" for figure in RECALL for band in BANDS)),
    "dialogue": DIALOGUE_FIGURES,
    "inspect": REGRESSION_FIGURES,
}


@dataclass
class Row:
    """One system of the table."""

    name: str = MISSING  # as in the paper
    paper: dict[str, float] = field(default_factory=dict)  # column -> the paper's figure, if it has one
    sizes: dict[str, float] = field(default_factory=dict)  # the paper's sizes, by the names in SIZES
    note: str | None = None
    best_of: list[str] = field(default_factory=list)  # not run; shows the test result of the best on validation


@dataclass
class Column:
    """One figure of every row."""

    figure: str = MISSING  # name in the evaluation's report: word_perplexity, bits_per_byte, accuracy
    band: list[int] = field(default_factory=list)  # of a figure of RECALL: distances above the first, up to the second
    split: str = "test"
    point: str = ""  # where it is measured; "": the only point
    evaluate: list[str] = field(default_factory=list)  # key=value overrides and options of the evaluation
    command: str = "evaluate"  # the command that measures it: evaluate | dialogue | inspect


@dataclass
class Point:
    """Data and settings that the rows share."""

    data: str = MISSING  # data directory; a row may set another one with data.path=
    build: list[list[str]] = field(default_factory=list)  # commands that build missing data; empty: users build it
    made_by: str | None = None  # without `build`: the command that users run
    vocab_size: int | None = None  # of the data, if known before they are built; for `--check`
    train: list[str] = field(default_factory=list)  # key=value overrides
    without: list[str] = field(default_factory=list)  # rows that are not run here


@dataclass
class Scale:
    """The settings that run a table on one class of machine."""

    about: str = MISSING  # differences from the paper: data, sizes, steps
    train: list[str] = field(default_factory=list)  # configurations and overrides of all rows
    rows: dict[str, list[str]] = field(default_factory=dict)  # row -> its configurations; rows not here are not run
    seeds: list[int] = field(default_factory=lambda: [0])
    points: dict[str, Point] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)  # if given, replace the table's
    name: str = ""  # its key; set by `load_table`

    @property
    def is_papers(self) -> bool:
        """Whether data and sizes are the paper's, so that its figures are comparable with ours."""
        return self.name == PAPERS


@dataclass
class Table:
    """A table or a figure of a paper."""

    path: str = ""  # of its file; set by `load_table`

    title: str = MISSING
    source: str = MISSING  # the paper and the number of the table in it
    x_axis: str | None = None  # for a figure: label of the numbers that name its columns; None: a table
    y_axis: str | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, list[str]] = field(default_factory=dict)  # of `dist-mem figure` -> rows whose runs it shows
    scales: dict[str, Scale] = field(default_factory=dict)


def table_names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all tables, sorted."""
    return sorted(path.stem for path in _present(folder).glob("*.yaml"))


def _present(folder: Path) -> Path:
    """Return the folder, or, outside of a clone, the one of this name that comes with dist_mem."""
    return folder if folder.is_dir() else shipped_path(str(folder)) or folder


def table_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a table, given the name of a table of this project or a path.

    Raises:
        UnusableError: there is no such file.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if not Path(name).is_file():
            raise UnusableError(f"there is no table file {name}")
        return Path(name)
    path = _present(folder) / f"{name}.yaml"
    if not path.exists():
        known = table_names(folder)
        there = listed(known) if known else f": none; start the command in the folder that holds {FOLDER}"
        raise UnusableError(
            f"there is no table {name!r}{hint(name, known)}; give the path of a .yaml file, or the name of one{there}"
        )
    return path


def load_table(name: str, folder: Path = FOLDER) -> Table:
    """Read and check a table; `name` as in `table_path`.

    Raises:
        UnusableError: there is no such table, or its file is invalid; the message names the file and the key.
    """
    path = table_path(name, folder)
    table: Table = read_block(Table, path)
    table.path = str(path)
    check_table(table)
    return table


def check_table(table: Table) -> None:
    """Check a table, and find its configurations, which are looked up in the working directory, then beside its file.

    Raises:
        UnusableError: the table is invalid; the message names the file and the key.
    """
    path = Path(table.path)
    for name, row in table.rows.items():
        _check_name(name, where=f"{path}: row")
        unknown = [other for other in row.best_of if other not in table.rows]
        if unknown:
            raise UnusableError(f"{path}: rows.{name}.best_of has {unknown[0]!r}, which is not a row of the table")
        chosen = [other for other in row.best_of if table.rows[other].best_of]
        if chosen:
            raise UnusableError(f"{path}: rows.{name}.best_of has {chosen[0]!r}, which has a best_of itself")
        odd = [size for size in row.sizes if size not in SIZES]
        if odd:
            raise UnusableError(f"{path}: rows.{name}.sizes has {odd[0]!r}, not one of {', '.join(SIZES)}")
    for figure, rows in table.figures.items():
        strangers = [row for row in rows if row not in table.rows]
        if strangers:
            raise UnusableError(f"{path}: figures.{figure} has {strangers[0]!r}, which is not a row of the table")
    for scale_name, scale in table.scales.items():
        scale.name = scale_name
        _check_scale(table, scale, where=f"{path}: scales.{scale_name}")
        _find_configurations(scale, beside=path.parent)


def _find_configurations(scale: Scale, *, beside: Path) -> None:
    """Replace configurations that are beside the table, but not in the working directory, by their paths."""
    for arguments in (scale.train, *scale.rows.values(), *(point.train for point in scale.points.values())):
        arguments[:] = [
            str(beside / word) if not Path(word).is_file() and (beside / word).is_file() else word for word in arguments
        ]


def _check_name(name: str, *, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise UnusableError(
            f"{where} {name!r} names files and figures: begin with a letter or digit; letters, digits, blanks and any "
            "of _ - . : may follow"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _check_scale(table: Table, scale: Scale, *, where: str) -> None:
    for name in filter(None, scale.points):  # "", the only point, is not part of any name
        _check_name(name, where=f"{where}: point")
    if not scale.seeds or len(set(scale.seeds)) < len(scale.seeds) or min(scale.seeds) < 0:
        raise UnusableError(f"{where}.seeds is {scale.seeds}, but must be different numbers of at least 0, as [0, 1]")
    columns = scale.columns or table.columns
    for key, content in (("rows", scale.rows), ("columns", columns)):
        if not content:
            raise UnusableError(f"{where} has no {key}")
    unknown = [row for row in scale.rows if row not in table.rows]
    if unknown:
        raise UnusableError(f"{where}.rows has {unknown[0]!r}, which is not a row of the table")
    for name, point in scale.points.items():
        odd = [row for row in point.without if row not in scale.rows]
        if odd:
            raise UnusableError(f"{where}.points.{name}.without has {odd[0]!r}, which is not a row of this scale")
    nowhere = [row for row in scale.rows if all(row in point.without for point in scale.points.values())]
    if nowhere and scale.points:
        raise UnusableError(f"{where}.rows has {nowhere[0]!r}, but {nowhere[0]!r} is run at no point")
    chosen = [row for row in scale.rows if table.rows[row].best_of]
    if chosen:
        raise UnusableError(f"{where}.rows has {chosen[0]!r}, which is the best of other rows and not run itself")
    for name, column in columns.items():
        _check_name(name, where=f"{where}: column")
        if column.command not in MEASURES:
            raise UnusableError(
                f"{where}: column {name!r} has command {column.command!r}, not one of {', '.join(MEASURES)}"
            )
        known = MEASURES[column.command]
        if column.figure not in known:
            raise UnusableError(
                f"{where}: column {name!r} has figure {column.figure!r}, which {column.command} does not measure"
                f"{hint(column.figure, known)}; it measures{listed(known)}"
            )
        if column.point not in scale.points:
            raise UnusableError(f"{where}.points lacks {column.point!r}, the point of column {name!r}")
        lengths = (1, 2) if column.figure in RECALL else (0,)
        if len(column.band) not in lengths or column.band != sorted(set(column.band)):
            raise UnusableError(
                f"{where}: column {name!r} has band {column.band} and figure {column.figure}; {' and '.join(RECALL)} "
                "have a band of 1 or 2 rising numbers, no other figure has one"
            )
        if table.x_axis is not None and not _is_number(name):
            raise UnusableError(
                f"{where}: column {name!r} is not a number, which x_axis requires: rename it or leave x_axis out"
            )

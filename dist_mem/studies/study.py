"""Definition of a study: rows x columns x seeds, trained, measured and written as one table.

A paper's table, a sweep and an arena are studies. The classes here define the keys of their YAML files; those of this
project are in configs/tables, configs/sweeps and configs/arena. A run is one row at one point with one seed. A point is
data and settings that the rows share, such as the length of the sequences in a figure; most studies have one, given
by `data` and `build`. A study may be run at several scales; a scale replaces keys of the study.

title: Which memory?
train: [configs/demo.yaml]                       # configurations and overrides of all rows
rows:                                            # name -> its configurations and overrides
  none: [configs/memory/none.yaml]
  transformer_xl: [configs/memory/transformer_xl.yaml]
grid: {optimizer.lr: [0.001, 0.002]}             # further rows, one per combination: grid.py
budget: {tokens: 4e6}                            # of every row: budget.py
tune: {grid: {optimizer.lr: [0.001, 0.002]}}     # of every row, before its runs: tuning.py
seeds: [0, 1, 2]
columns: {perplexity: {metric: word_perplexity}}
data: data/sample
build: [[dist-mem, data, build, sample, --out, data/sample]]
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dist_mem.config import read_block
from dist_mem.config.check import format_value, hint
from dist_mem.errors import UnusableError
from dist_mem.evaluation.scores import BANDS, METRICS, POSITION_METRIC
from dist_mem.evaluation.scores import RECALL_METRICS as RECALL
from dist_mem.papers.dialogue.scores import DIALOGUE_METRICS
from dist_mem.papers.regression_error import METRICS as REGRESSION_METRICS
from dist_mem.runtime.files import is_file
from dist_mem.runtime.names import check_plain
from dist_mem.runtime.shipped_files import say_where_from, shipped_path
from dist_mem.runtime.terminal import count_noun, list_names
from dist_mem.studies.cells import CellRun
from dist_mem.studies.grid import combinations, settle_grid, trial_label

FOLDER = Path("configs") / "tables"  # of the studies that have a name
MAX_RUNS = 1000  # unless the command says more
_NAME = re.compile(r"\w[\w .:-]*")  # names of files, and of metrics in MLflow, which accepts no others
_MOST_BYTES = 50  # of a name; the name of a log has those of a row, a point and a column, and at most 255
_MOST_ROW_BYTES = 110  # one of the grid has several values in its name
_OF_A_RUN = ("train.seed", "data.seed", "name", "run_dir")
PAPERS = "paper"  # name of the scale with the paper's data and sizes
SIZES = ("parameters", "multiply_adds")  # of a model; multiply-adds per predicted token in scoring
WORK = ("tokens", "flops")  # of the training: a budget of one of them sets its steps
FITTED = ("params", "state_bytes")  # budgets that set the keys of `fit`
# Command of dist-mem that measures a trained model -> the metrics of its report.
MEASURES = {
    "evaluate": (*METRICS, *RECALL, POSITION_METRIC, *(f"{metric}_{band}" for metric in RECALL for band in BANDS)),
    "dialogue": DIALOGUE_METRICS,
    "inspect": REGRESSION_METRICS,
}


@dataclass
class StudyRow:
    """One system of the table. A file may give a list in its place: that of `train`."""

    name: str = ""  # as in the paper; "": its key
    train: list[str] | None = None  # its configurations and overrides; None: it is not run
    paper: dict[str, float] = field(default_factory=dict)  # column -> the paper's metric, if it has one
    sizes: dict[str, float] = field(default_factory=dict)  # the paper's sizes, by the names in SIZES
    note: str | None = None
    best_of: list[str] = field(default_factory=list)  # not run; shows the test result of the best on validation


@dataclass
class Column:
    """One metric of every row."""

    metric: str  # name in the evaluation's report: word_perplexity, bits_per_byte, accuracy
    # of a metric of RECALL: distances above the first, up to the second; of POSITION_METRIC: positions of a document
    band: list[int] = field(default_factory=list)
    split: str = "test"
    point: str = ""  # where it is measured; "": the only point
    evaluate: list[str] = field(default_factory=list)  # key=value overrides and options of the evaluation
    command: str = "evaluate"  # the command that measures it: evaluate | dialogue | inspect


@dataclass
class GridPoint:
    """Data and settings that the rows share."""

    data: str  # data directory; a row may set another one with data.path=
    build: list[list[str]] = field(default_factory=list)  # commands that build missing data; empty: users build it
    made_by: str | None = None  # without `build`: the command that users run
    vocab_size: int | None = None  # of the data, if known before they are built; for `--check`
    train: list[str] = field(default_factory=list)  # key=value overrides
    without: list[str] = field(default_factory=list)  # rows that are not run here


@dataclass
class Tune:
    """How each row gets settings of its own before its runs: tuning.py."""

    grid: dict[str, list[Any]] = field(default_factory=dict)  # key -> its values; empty: no row is tuned
    rows: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # row -> further keys
    budget: dict[str, float] = field(default_factory=dict)  # of a trial; empty: that of the study
    seeds: list[int] = field(default_factory=list)  # other ones than those of the table; empty: the next one after them
    most: int = 8  # values of a key, when the best one stays at the edge


@dataclass
class Scale:
    """The settings that run a study on one class of machine, in place of the study's own."""

    about: str = ""  # differences from the paper: data, sizes, steps
    train: list[str] = field(default_factory=list)  # configurations and overrides of all rows
    rows: dict[str, list[str]] = field(default_factory=dict)  # row -> its `train`; rows not here are not run
    seeds: list[int] = field(default_factory=lambda: [0])
    points: dict[str, GridPoint] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)  # empty: those of the study


@dataclass
class Study(Scale):
    """The keys of a file; `load_study` applies one of the scales."""

    title: str = ""  # "": the name of the file
    source: str = ""  # the paper and the number of the table in it; "": the command that runs the study
    x_axis: str | None = None  # for a figure: label of the numbers that name its columns; None: a table
    y_axis: str | None = None
    rows: dict[str, StudyRow] = field(default_factory=dict)  # type: ignore[assignment]  # a scale's give them their `train`
    notes: list[str] = field(default_factory=list)
    figures: dict[str, list[str]] = field(default_factory=dict)  # of `dist-mem figure` -> rows whose runs it shows
    # key -> its values; `memory`, or another name without a dot: configurations, or lists of overrides
    grid: dict[str, list[Any]] = field(default_factory=dict)
    skip: list[dict[str, Any]] = field(default_factory=list)  # combinations that have all these values
    tune: Tune = field(default_factory=Tune)
    budget: dict[str, float] = field(default_factory=dict)  # of every row
    paired: bool = False  # rows of one seed have much in common, as their first updates: they are compared by seed
    fit: dict[str, Any] = field(default_factory=dict)  # keys that give a row the sizes of the budget
    data: str | None = None  # of the only point; `points` if there are several
    build: list[list[str]] = field(default_factory=list)
    scales: dict[str, Scale] = field(default_factory=dict)
    path: str = ""  # of its file; set by `load_study`
    scale: str = ""  # the one that is applied; set by `load_study`

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_papers(self) -> bool:
        """Whether data and sizes are the paper's, so that its metrics are comparable with ours."""
        return self.scale == PAPERS

    @property
    def trained_rows(self) -> dict[str, list[str]]:
        """The rows that are run: name -> configurations and overrides."""
        return {name: row.train for name, row in self.rows.items() if row.train is not None}

    @property
    def candidates(self) -> dict[str, str]:
        """The rows among which another row is the best: name -> that row."""
        return {one: name for name, row in self.rows.items() for one in row.best_of}


def study_names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all studies in a folder, sorted."""
    return sorted(path.stem for path in _find_folder(folder).glob("*.yaml"))


def _find_folder(folder: Path) -> Path:
    """Return the folder, or, outside of a clone, the one of this name that comes with dist_mem."""
    return folder if folder.is_dir() else shipped_path(str(folder)) or folder


def study_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a study, given its path, also of one that comes with dist_mem, or its name in a folder.

    Raises:
        UnusableError: there is no such file.
    """
    if not name.endswith((".yaml", ".yml")) and "/" not in name:
        path = _find_folder(folder) / f"{name}.yaml"
        if is_file(path):
            return path
        known = study_names(folder)
        there = list_names(known) if known else f": none; start the command in the folder that holds {FOLDER}"
        raise UnusableError(
            f"there is no table {name!r}{hint(name, known)}; give the path of a .yaml file, or the name of one{there}"
        )
    found = Path(name) if is_file(Path(name)) else shipped_path(name)
    if found is None or not is_file(found):
        raise UnusableError(f"there is no file {name}: give the YAML file of a table, a sweep or an arena")
    if found != Path(name):
        say_where_from()
    return found


def load_study(name: str, scale: str = "", *, folder: Path = FOLDER, max_runs: int = MAX_RUNS) -> Study:
    """Read a study, apply a scale and check it.

    Args:
        name: as in `study_path`.  scale: one of the file's; "": its first, or none if it has none.

    Raises:
        UnusableError: there is no such study or scale, its file is invalid, or it has more runs than `max_runs`; the
            message names the file and the key.
    """
    path = study_path(name, folder)
    study = read_block(Study, path, _settle)
    study.path = str(path)
    if study.scales or scale:
        study = _scale_study(study, scale or next(iter(study.scales)))
    where = f"{path}: {f'scales.{study.scale}.' if study.scale else ''}"
    _check_number(study, max_runs, where=str(path))
    if study.data is not None:
        study.points.setdefault("", GridPoint(data=study.data, build=study.build))
    found = combinations(study.grid, study.skip, taken=study.rows, where=where)
    study.rows = {row: StudyRow(train=words) for row, words in found.items()} | study.rows
    for key, row in study.rows.items():
        row.name = row.name or key
    study.columns = study.columns or {"word_perplexity": Column("word_perplexity", split="validation")}
    study.title = study.title or path.stem
    if study.budget:
        sizes = ", ".join(f"{value:g} {budget}" for budget, value in study.budget.items())
        study.about = study.about or f"Budget of each: {sizes}."
    study.source = study.source or f"dist-mem {'arena' if study.budget else 'sweep'} {name}"
    _check_rows(study, where)
    _check_points(study, where)
    for words in (study.train, *study.trained_rows.values(), *(point.train for point in study.points.values())):
        check_words(words, where)
    _check_columns(study, where)
    if study.budget or study.fit:
        _check_budget(study, where)
    if study.tune.grid or study.tune.rows:
        study.tune.seeds = study.tune.seeds or [max(study.seeds) + 1]
        _check_tune(study, where)
    _find_configurations(study, beside=path.parent)
    return study


def check_words(words: Iterable[str], where: str = "") -> None:
    """Raise UnusableError if overrides of several runs set what each has of its own."""
    if own := [word for word in words if word.partition("=")[0] in _OF_A_RUN]:
        raise UnusableError(
            f"{where}{own[0]}: every run of a study has its own; leave it out, or give --seeds or --out"
        )


def _settle(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a study with its rows as blocks, and the values of its grid as a configuration reads them."""
    rows = tree.get("rows")
    if isinstance(rows, Mapping):
        blocks = {
            name: {"train": [str(word) for word in row]} if isinstance(row, list) else row for name, row in rows.items()
        }
        tree = {**tree, "rows": blocks}
    if "budget" in tree:
        tree = {"seeds": [0, 1, 2], **tree}  # an interval over seeds needs several
    return settle_grid(tree)


def _scale_study(study: Study, name: str) -> Study:
    """Return the study with the settings of one of its scales."""
    for each in study.scales:
        _check_name(each, where=f"{study.path}: scale")
    if name not in study.scales:
        raise UnusableError(f"{study.path} has no scale {name!r}; it has: {', '.join(study.scales) or 'none'}")
    scale = study.scales[name]
    unknown = [row for row in scale.rows if row not in study.rows]
    if unknown:
        raise UnusableError(f"{study.path}: scales.{name}.rows has {unknown[0]!r}, which is not a row of the table")
    rows = {key: replace(row, train=scale.rows.get(key)) for key, row in study.rows.items()}
    return replace(
        study,
        scale=name,
        about=scale.about,
        train=scale.train,
        rows=rows,
        seeds=scale.seeds,
        points=scale.points,
        columns=scale.columns or study.columns,
    )


def _check_number(study: Study, max_runs: int, *, where: str) -> None:
    """Raise UnusableError if there are more runs than `max_runs`."""
    num_rows = (math.prod(map(len, study.grid.values())) if study.grid else 0) + len(study.rows)
    num_rows *= max(1, len(study.points))
    if num_rows * len(study.seeds) > max_runs:
        raise UnusableError(
            f"{where}: {num_rows:,} combinations and rows with {count_noun(len(study.seeds), 'seed')} are "
            f"{num_rows * len(study.seeds):,} runs, more than {max_runs:,}: give fewer values, or --max-runs"
        )


def _find_configurations(study: Study, *, beside: Path) -> None:
    """Replace configurations that are beside the study, but not in the working directory, by their paths."""
    for arguments in (study.train, *study.trained_rows.values(), *(point.train for point in study.points.values())):
        arguments[:] = [
            str(beside / word) if not is_file(Path(word)) and is_file(beside / word) else word for word in arguments
        ]


def _check_name(name: str, *, where: str, most: int = _MOST_BYTES) -> None:
    if not _NAME.fullmatch(name):
        raise UnusableError(
            f"{where} {format_value(name)} names files and metrics: begin with a letter or digit; letters, digits, "
            "blanks and any of _ - . : may follow"
        )
    if (size := len(name.encode())) > most:
        raise UnusableError(f"{where} {format_value(name)} names files, and has {size:,} bytes: give at most {most}")


def _check_rows(study: Study, where: str) -> None:
    if not study.trained_rows:
        raise UnusableError(f"{where}rows is empty, and there is no grid: nothing would be trained")
    for name, row in study.rows.items():
        _check_name(name, where=f"{study.path}: row", most=_MOST_ROW_BYTES)
        at = f"{study.path}: rows.{name}"
        unknown = [other for other in row.best_of if other not in study.rows]
        if unknown:
            raise UnusableError(f"{at}.best_of has {unknown[0]!r}, which is not a row of the table")
        chosen = [other for other in row.best_of if study.rows[other].best_of]
        if chosen:
            raise UnusableError(f"{at}.best_of has {chosen[0]!r}, which has a best_of itself")
        if row.best_of and row.train is not None:
            raise UnusableError(f"{where}rows has {name!r}, which is the best of other rows and not run itself")
        odd = [size for size in row.sizes if size not in SIZES]
        if odd:
            raise UnusableError(f"{at}.sizes has {odd[0]!r}, not one of {', '.join(SIZES)}")
    for figure, rows in study.figures.items():
        _check_name(figure, where=f"{study.path}: figure")
        strangers = [row for row in rows if row not in study.rows]
        if strangers:
            raise UnusableError(f"{study.path}: figures.{figure} has {strangers[0]!r}, which is not a row of the table")


def _check_points(study: Study, where: str) -> None:
    _check_numbers(study.seeds, f"{where}seeds")
    if not study.points:
        raise UnusableError(f"{where}data is not set: give the data directory of the rows, or points")
    for name, point in study.points.items():
        if name:  # "", the only point, is not part of any name
            _check_name(name, where=f"{where}point")
        odd = [row for row in point.without if row not in study.trained_rows]
        if odd:
            raise UnusableError(f"{where}points.{name}.without has {odd[0]!r}, which is not a row of this scale")
    nowhere = [row for row in study.trained_rows if all(row in point.without for point in study.points.values())]
    if nowhere:
        raise UnusableError(f"{where}rows has {nowhere[0]!r}, but {nowhere[0]!r} is run at no point")
    found: dict[str, tuple[str, str]] = {}
    for row, name in itertools.product(study.trained_rows, study.points):
        if row not in study.points[name].without:
            first, its_point = found.setdefault(CellRun(row, name, 0, Path()).name, (row, name))
            if (first, its_point) != (row, name):
                raise UnusableError(
                    f"{where}rows has {first!r} and {row!r}, at {its_point!r} and {name!r}, whose runs and cells have "
                    "one name: rename a row or a point"
                )


def _check_numbers(seeds: Sequence[int], where: str) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UnusableError(f"{where} is {seeds}, but must be different numbers of at least 0, as [0, 1]")


def _check_columns(study: Study, where: str) -> None:
    for name, column in study.columns.items():
        _check_name(name, where=f"{where}column")
        at = f"{where}column {name!r}"
        if column.command not in MEASURES:
            raise UnusableError(f"{at} has command {column.command!r}, not one of {', '.join(MEASURES)}")
        known = MEASURES[column.command]
        if column.metric not in known:
            raise UnusableError(
                f"{at} has metric {column.metric!r}, which {column.command} does not measure"
                f"{hint(column.metric, known)}; it measures{list_names(known)}"
            )
        check_plain(column.split, f"{at} has a split that")
        if column.point not in study.points:
            raise UnusableError(f"{where}points lacks {column.point!r}, the point of column {name!r}")
        lengths = (1, 2) if column.metric in (*RECALL, POSITION_METRIC) else (0,)
        if len(column.band) not in lengths or column.band != sorted(set(column.band)):
            raise UnusableError(
                f"{at} has band {column.band} and metric {column.metric}; {', '.join(RECALL)} and {POSITION_METRIC} "
                "have a band of 1 or 2 rising numbers, no other metric has one"
            )
        if column.metric == POSITION_METRIC:
            _check_positions(column, at)
        if study.x_axis is not None and not _is_number(name):
            raise UnusableError(f"{at} is not a number, which x_axis requires: rename it or leave x_axis out")


def _check_positions(column: Column, at: str) -> None:
    if odd := [limit for limit in column.band if (limit + 1).bit_count() != 1]:
        more = 2 ** odd[0].bit_length() - 1
        raise UnusableError(f"{at} has {odd[0]} in its band: positions are in octaves, write {more} or {more // 2}")
    if column.evaluate[:2] != ["--by", "position"]:
        raise UnusableError(f"{at} has metric {POSITION_METRIC}: begin its evaluate with [--by, position]")


def _check_budget(study: Study, where: str) -> None:
    """Raise UnusableError for a budget that says not exactly how long to train, or sizes that nothing fits."""
    budget = study.budget
    unknown = [name for name in budget if name not in (*WORK, *FITTED)]
    if unknown:
        raise UnusableError(f"{where}budget has {unknown[0]!r}, but must be of {', '.join((*WORK, *FITTED))}")
    if sum(name in budget for name in WORK) != 1:
        raise UnusableError(f"{where}budget must have exactly one of {' and '.join(WORK)}, which sets train.steps")
    for name in (name for name in FITTED if (name in budget) != (name in study.fit)):
        raise UnusableError(f"{where}{name} must be both in budget, the size, and in fit, the key that sets it")
    _check_amounts(budget, f"{where}budget")
    shown = [name for name in study.rows if name not in study.candidates]
    if len(shown) < 2:
        raise UnusableError(f"{where}rows has {len(shown)}; a budget needs at least two, to compare")
    if odd := [(size, row) for size in study.fit for row in _fit_by_row(study, size) if row not in shown]:
        size, row = odd[0]
        best = study.candidates.get(row)
        fix = f"which is tried for {best!r}: name that" if best else f"not one of{list_names(shown)}{hint(row, shown)}"
        raise UnusableError(f"{where}fit.{size} has the row {row!r}, {fix}")
    if len(study.points) > 1:
        raise UnusableError(f"{where}points has {len(study.points)}; a budget is that of one point")
    own = {f"data.path={point.data}" for point in study.points.values()}
    words = {f"columns.{name}.evaluate": column.evaluate for name, column in study.columns.items()}
    words |= {f"rows.{name}": train for name, train in study.trained_rows.items()}
    for place, each in words.items():
        for word in (word for word in each if word.startswith("data.path=") and word not in own):
            # Costs and intervals are those of one data directory.
            raise UnusableError(
                f"{where}{place} has {word!r}, but a study with a budget scores all rows and columns on its own data: "
                "compare other data without a budget"
            )


def _check_amounts(budget: Mapping[str, float], where: str) -> None:
    if wrong := [name for name, value in budget.items() if not 0 < value < math.inf]:
        raise UnusableError(f"{where}.{wrong[0]} is {budget[wrong[0]]:g}, but must be a number above 0")


def _fit_by_row(study: Study, size: str) -> dict[str, Any]:
    """Return row -> key that sets a size of the budget; a row that is the best of others stands for them."""
    by_row, shown = study.fit[size], [row for row in study.rows if row not in study.candidates]
    return dict(by_row) if isinstance(by_row, Mapping) else dict.fromkeys(shown, by_row)


def _check_tune(study: Study, where: str) -> None:
    """Raise UnusableError for a grid of no row, or one that a study cannot have."""
    tune = study.tune
    unknown = [row for row in tune.rows if row not in study.trained_rows]
    if unknown:
        raise UnusableError(f"{where}tune.rows has {unknown[0]!r}, which is not a row of the study")
    if hidden := [row for row in tune.rows if row in study.candidates]:
        chosen = study.candidates[hidden[0]]
        raise UnusableError(
            f"{where}tune.rows has {hidden[0]!r}, which is tried for the row {chosen!r} (best_of): give its values as "
            "rows of their own"
        )
    for size in study.fit:
        for row, key in _fit_by_row(study, size).items():
            if key in {**tune.grid, **tune.rows.get(row, {})}:
                raise UnusableError(f"{where}tune has {key} of {row}, which fit.{size} sets: leave out one of them")
    for name, grid in {"grid": tune.grid, **{f"rows.{row}": grid for row, grid in tune.rows.items()}}.items():
        if empty := [key for key, values in grid.items() if not values or _has_equal(values)]:
            raise UnusableError(f"{where}tune.{name}.{empty[0]} is {grid[empty[0]]}, but must be different values")
        check_words((f"{key}={values}" for key, values in grid.items()), f"{where}tune.{name}: ")
        if study.budget and "data.path" in grid:
            raise UnusableError(
                f"{where}tune.{name} has data.path, but a study with a budget scores all rows on its own data: leave "
                "it out"
            )
    if len(study.points) > 1:
        raise UnusableError(f"{where}points has {len(study.points)}; rows are tuned at one point")
    if unknown := [name for name in tune.budget if name not in study.budget]:
        raise UnusableError(f"{where}tune.budget has {unknown[0]!r}, which the budget of the study has not")
    _check_amounts(tune.budget, f"{where}tune.budget")
    _check_numbers(tune.seeds, f"{where}tune.seeds")
    check_seeds(study, where)


def check_seeds(study: Study, where: str) -> None:
    """Raise UnusableError if settings are chosen on a seed of the table, which the best of several owes a part to."""
    if (study.tune.grid or study.tune.rows) and (both := sorted({*study.seeds} & {*study.tune.seeds})):
        raise UnusableError(
            f"{where}tune.seeds has {both[0]}, which is also a seed of the table: the settings that are best there owe "
            f"a part to that seed; give trials seeds of their own, as [{max(*study.seeds, *study.tune.seeds) + 1}]"
        )


def _has_equal(values: Sequence[Any]) -> bool:
    """Return whether two values of a grid are equal, or would name the same trial."""
    pairs = itertools.combinations(values, 2)
    return any(one == other or trial_label(one) == trial_label(other) for one, other in pairs)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False

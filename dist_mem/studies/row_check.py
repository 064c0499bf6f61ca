"""`--check` of a study: print the resolved settings of every row without building or training.

Settings that all rows share are printed once, then per row its other settings, its size, its data and the paper's
metrics. Data and pretrained weights need not exist; if they do, the row is checked against them. A budget is applied:
with an assumed vocabulary its steps and sizes are approximate.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.block import ModelSpec, model_spec
from dist_mem.config import Config, DataConfig, ModelConfig, as_tree, load_config
from dist_mem.config.keys import RESULT, SCORE, SPEED
from dist_mem.config.settings import select_keys
from dist_mem.data.directory import check_split, local_dir
from dist_mem.data.remote.fetch import is_remote, show
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.estimate.counting import NotCountedError, flops_per_token
from dist_mem.estimate.dry_run import check_model, subjects
from dist_mem.estimate.vocabulary import ASSUMED_VOCAB_SIZE
from dist_mem.memory import memory_options
from dist_mem.model import describe
from dist_mem.studies.budget import UNKNOWN_STEPS, apply_budget
from dist_mem.studies.cells import CellRun
from dist_mem.studies.definition import Settings
from dist_mem.studies.runs import all_runs, columns_at, rows_behind, shown_rows, train_words
from dist_mem.studies.study import Study, StudyRow
from dist_mem.studies.study_call import StudyCall
from dist_mem.studies.tuning import grids_of, trials_of

_WIDTH = 120


class CheckedRow(NamedTuple):
    """One row at one point, whose settings a training accepts."""

    run: CellRun
    config: Config
    settings: Settings


def check(study: Study, *, rows: Sequence[str], ranks: int, extra: list[str]) -> int:
    """Print the resolved settings, every row as soon as it is checked. Returns the exit code: 2 if one cannot be run.

    Args:
        rows: empty: all.
    """
    _print_beginning(study)
    requested = [one for row in rows for one in rows_behind(study, row)]
    apply_budget(study, lambda words: load_config([*words, *extra], memory_options=memory_options))
    checked, refused = [], []
    for run in _representatives(study, requested):
        try:
            checked.append(_resolve(study, run, extra))
        except UnusableError as error:
            refused.append(str(error))
    checked = [one for one in checked if one.run.seed == study.seeds[0]]
    shared = _shared_settings(one.settings for one in checked)
    _print_settings(shared)
    _print_points(study, checked, shared)
    shown = rows or shown_rows(study)
    for row in shown:
        mine = [one for one in checked if one.run.row == row]
        _print_settings_of(study, row, mine, known=shared)
        refused += [text for one in mine for text in _refusals(study, one, extra, ranks)]
        _print_papers(study.rows[row])
    others = [one for one in checked if one.run.row not in shown]  # which one of these is the best of
    refused += [text for one in others for text in _refusals(study, one, extra)]
    for note in study.notes:
        print(textwrap.fill(note, _WIDTH, initial_indent="- ", subsequent_indent="  "))
    for text in refused:
        print(f"error: {text}", file=sys.stderr)
    return EXIT_USAGE if refused else EXIT_DONE


def _refusals(study: Study, one: CheckedRow, extra: Sequence[str], ranks: int = 0) -> Iterator[str]:
    """Check a run further, print its size and data for so many ranks (0: not), and yield why it cannot be run."""
    try:
        _check_further(study, one, extra)
        if ranks:
            _print_lines(study, one, ranks)
            sys.stdout.flush()
    except UnusableError as error:
        yield str(error)


def check_rows(study: Study, extra: Sequence[str], rows: Sequence[str] = ()) -> None:
    """Check every row before the first run, as `check` does.

    Args:
        rows: that will be run; empty: all.

    Raises:
        UnusableError: for the first row that cannot be run; nothing is allocated or started.
    """
    for run in _representatives(study, rows):
        _check_further(study, _resolve(study, run, extra), extra)


def check_trials(job: StudyCall) -> None:
    """Check the keys and values of every trial of `tune`. Raises UnusableError for the first that is refused."""
    trials = trials_of(job, grids_of(job))
    extra = [*job.extra, *([UNKNOWN_STEPS] if job.study.budget else [])]
    for run in all_runs(trials.study, trials.out, trials.study.seeds[:1]):
        _resolve(trials.study, run, extra)


def _representatives(study: Study, rows: Sequence[str]) -> list[CellRun]:
    """Return the runs whose check is that of all: every row with the first seed, and one row with the others."""
    first, *others = study.seeds
    chosen = rows or list(study.trained_rows)
    return all_runs(study, Path(), [first], chosen) + (all_runs(study, Path(), others, chosen[:1]) if others else [])


def _resolve(study: Study, run: CellRun, extra: Sequence[str]) -> CheckedRow:
    """Return the settings of a run: its keys, its seed. Raises UnusableError, which names the study and the row."""
    try:
        config = load_config(train_words(study, run, extra), memory_options=memory_options)
    except UnusableError as error:
        raise UnusableError(f"{_title(study, run)}: {error}") from error
    return CheckedRow(run, config, select_keys(as_tree(config), affects=RESULT | SCORE | SPEED))


def _check_further(study: Study, one: CheckedRow, extra: Sequence[str]) -> None:
    """Check the model of a run, and of its columns the overrides and the splits.

    Raises:
        UnusableError: it cannot be run; the message names the study, the row and the column.
    """
    words, where = train_words(study, one.run, extra), _title(study, one.run)
    point, accepted = study.points[one.run.point], [list[str]()]
    try:
        check_model(one.config)
        for name, column in columns_at(study, one.run.point).items():
            where = f"{_title(study, one.run)}: column {name}"
            if not point.build and not is_remote(one.config.data.path):  # else the split may be made or fetched
                check_split(one.config.data, column.split)
            measuring = [word for word in column.evaluate if "=" in word and not word.startswith("-")]
            if measuring not in accepted:
                load_config([*words, *measuring], memory_options=memory_options)
                accepted.append(measuring)
    except UnusableError as error:
        raise UnusableError(f"{where}: {error}") from error


def _title(study: Study, run: CellRun) -> str:
    return f"{study.path}: row {run.row}{f' at {run.point}' if run.point else ''}"


def _print_beginning(study: Study) -> None:
    about = f"scale {study.scale}: {study.about}" if study.scale else study.about
    print(f"{study.title}\n{study.source}\n{about}\n")
    print(f"every row: {' '.join(study.train)}\nseeds: {', '.join(map(str, study.seeds))}", flush=True)


def _is_built(data: DataConfig) -> bool:
    return (local_dir(data) / JSON_NAME).exists()


def _lines(study: Study, one: CheckedRow, ranks: int) -> list[tuple[str, str]]:
    """Return label and text: size, data, missing weights. Raises ValueError if the data do not fit."""
    config, point = one.config, study.points[one.run.point]
    missing = _missing_weights(config.model)
    if _is_built(config.data):
        vocab_size = read_tokenizer_metadata(local_dir(config.data))["vocab_size"]
        found = [] if missing else subjects(config, world_size=ranks)  # or refuse the data
        of_data = [text for label, text in found if label in ("data", "training")]
        text = "; ".join(of_data) or show(config.data.path)
    else:
        vocab_size = point.vocab_size or ASSUMED_VOCAB_SIZE
        assumed = "" if point.vocab_size else f"; a vocabulary of {vocab_size:,} is assumed"
        text = f"{show(config.data.path)}: not built yet{assumed}"
    lines = [*_size_lines(model_spec(config, vocab_size)), ("data", text)]
    return [*lines, ("weights", f"{missing}: does not exist yet")] if missing else lines


def _missing_weights(model: ModelConfig) -> str | None:
    """Return `model.pretrained` if it is set and does not exist."""
    folder = model.pretrained
    return folder if folder is not None and not Path(folder).exists() else None


def _size_lines(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{describe(spec)['num_parameters']:,}"
    with suppress(NotCountedError):
        flops = flops_per_token(spec, num_lanes=1)  # of a lane alone, as the papers count
        yield "multiply_adds", f"{flops.scoring / 2e6:,.1f} M per predicted token"  # torch counts two for one


def _shared_settings(many: Iterable[Settings]) -> Settings:
    """Return the settings that all have with the same value."""
    first, *rest = [dict(one) for one in many] or [{}]
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in rest)}


def _print_settings(settings: Settings) -> None:
    """Print a paragraph per block: `model num_layers=16 d_model=410 ...`."""
    for block, keys in groupby(settings, key=lambda key: key.partition(".")[0]):
        _print_labelled(block, " ".join(f"{key.partition('.')[2] or key}={_value(settings[key])}" for key in keys))


def _print_labelled(label: str, text: str) -> None:
    """Print a paragraph with aligned lines, without breaking a setting across lines."""
    begin = f"  {label:<14}"
    wrapper = textwrap.TextWrapper(_WIDTH, begin, " " * len(begin), break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(text))


def _value(value: Any) -> str:
    """Return a value in YAML notation, without blanks."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else str(value)
    return str(text).replace(" ", "")


def _print_points(study: Study, checked: Sequence[CheckedRow], shared: Settings) -> None:
    """Print the settings that the rows share at one named point only, and how to build missing data."""
    for name, point in study.points.items():
        mine = [one for one in checked if one.run.point == name]
        if name:
            print(f"\nat {name}:")
            here = _shared_settings(one.settings for one in mine)
            _print_settings({key: value for key, value in here.items() if key not in shared})
        if point.made_by and not all(_is_built(one.config.data) for one in mine):
            _print_labelled("data built by", point.made_by)


def _print_settings_of(study: Study, key: str, checked: Sequence[CheckedRow], *, known: Settings) -> None:
    """Print the name of a row, and its settings that are not known of all rows."""
    row = study.rows[key]
    print(f"\n{key}: {row.name}{f' ({row.note})' if row.note else ''}")
    if row.best_of:
        for name in study.points:
            behind = ", ".join(rows_behind(study, key, name)) or "none"
            print(f"  best on validation{f' at {name}' if name else ''} of: {behind}")
    settings = _shared_settings(one.settings for one in checked)
    _print_settings({name: value for name, value in settings.items() if name not in known})


def _print_lines(study: Study, one: CheckedRow, ranks: int) -> None:
    """Print size and data of a row at one point. Raises UnusableError if the data do not fit."""
    at = f"at {one.run.point}: " if one.run.point else ""
    try:
        lines = _lines(study, one, ranks)
    except ValueError as error:
        raise UnusableError(f"{_title(study, one.run)}: {error}") from error
    for label, text in lines:
        _print_labelled(label, f"{at}{text}{_papers_size(study.rows[one.run.row], label)}")


def _print_papers(row: StudyRow) -> None:
    if row.paper:
        _print_labelled("the paper", ", ".join(f"{name} {value:g}" for name, value in row.paper.items()))


def _papers_size(row: StudyRow, label: str) -> str:
    return f" (the paper: {row.sizes[label] / 1e6:g} M)" if label in row.sizes else ""

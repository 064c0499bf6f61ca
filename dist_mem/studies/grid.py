"""Definition of a sweep: values of keys whose combinations are trained, and other rows, as a table of one scale.

train: [configs/demo.yaml, train.steps=300]      # configurations and overrides of all rows
grid:                                            # every combination is a row
  memory: [configs/memory/none.yaml, configs/memory/transformer_xl.yaml]
  optimizer.lr: [0.001, 0.002]
skip: [{memory: none, optimizer.lr: 0.002}]      # but not these
rows: {long: [configs/memory/transformer_xl.yaml, memory.mem_len=256]}
seeds: [0, 1]
columns: {perplexity: {figure: word_perplexity, split: validation}}
data: data/sample
build: [[dist-mem, data, build, sample, --out, data/sample]]
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING

from dist_mem.config import Config, read_block
from dist_mem.config.check import nearest
from dist_mem.config.keys import find_key
from dist_mem.config.values import Letters, settled, typed
from dist_mem.data.batch_plan import counted
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import is_file
from dist_mem.runtime.shipped import say_where_from, shipped_path
from dist_mem.studies.tables import Column, Point, Row, Scale, Table, check_table

SCALE = "sweep"  # name of the only scale of its table
MAX_RUNS = 1000  # unless the command says more


@dataclass
class Sweep:
    """The keys of the file."""

    title: str = ""
    train: list[str] = field(default_factory=list)
    # key -> its values; `memory`, or another name without a dot: configurations, or lists of overrides
    grid: dict[str, list[Any]] = field(default_factory=dict)
    skip: list[dict[str, Any]] = field(default_factory=list)  # combinations that have all these values
    rows: dict[str, list[str]] = field(default_factory=dict)  # further rows: their configurations and overrides
    seeds: list[int] = field(default_factory=lambda: [0])
    columns: dict[str, Column] = field(default_factory=dict)  # none: word-level perplexity on validation
    data: str = MISSING
    build: list[list[str]] = field(default_factory=list)  # commands that build missing data


def load_sweep(path: Path, *, max_runs: int = MAX_RUNS) -> Table:
    """Read a sweep, also one that comes with dist_mem, and return it as a table whose only scale is `SCALE`.

    Raises:
        UnusableError: there is no such file, it is invalid, or it has more runs than `max_runs`; the message names the
            file and the key.
    """
    found = found_file(path, "a sweep")
    sweep: Sweep = read_block(Sweep, found, _settled)
    num_rows = (math.prod(map(len, sweep.grid.values())) if sweep.grid else 0) + len(sweep.rows)
    check_number(num_rows, sweep.seeds, max_runs, where=str(path))
    rows = {**_combinations(sweep, path), **sweep.rows}
    if not rows:
        raise UnusableError(f"{path} has neither grid nor rows: nothing would be trained")
    table = Table(
        path=str(found),
        title=sweep.title or path.stem,
        source=f"dist-mem sweep {path}",
        rows={name: Row(name=name) for name in rows},
        columns=sweep.columns or {"word_perplexity": Column("word_perplexity", split="validation")},
    )
    point = Point(data=sweep.data, build=sweep.build)
    table.scales[SCALE] = Scale(
        about="", train=sweep.train, rows=rows, seeds=sweep.seeds, points={"": point}, name=SCALE
    )
    check_table(table)
    return table


def _settled(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a sweep with the values of its grid as the keys of a configuration read them."""
    grid, skip = tree.get("grid"), tree.get("skip")
    if isinstance(grid, Mapping):
        lists = {
            key: [_value(key, each) for each in values] for key, values in grid.items() if isinstance(values, list)
        }
        tree = {**tree, "grid": {**grid, **lists}}
    if isinstance(skip, list):
        tree = {**tree, "skip": [_condition(each) if isinstance(each, Mapping) else each for each in skip]}
    return cast(dict[str, Any], settled(tree))


def _condition(written: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(key, value) for key, value in written.items()}


def _value(key: str, written: Any) -> Any:
    """Return a value by the type of its key; an option of a memory, whose type is not known here, keeps its letters."""
    found = find_key(Config, key)
    value = settled(written if found is None else typed(found.schema, written, key))
    is_other = isinstance(written, Letters) and found is None and json.dumps(value) != written
    return str(written) if is_other else value


def check_number(num_rows: int, seeds: Sequence[int], max_runs: int, *, where: str) -> None:
    """Raise UnusableError if these rows and seeds are more runs than `max_runs`."""
    if num_rows * len(seeds) > max_runs:
        raise UnusableError(
            f"{where}: {num_rows:,} combinations and rows with {counted(len(seeds), 'seed')} are "
            f"{num_rows * len(seeds):,} runs, more than {max_runs:,}: give fewer values, or --max-runs"
        )


def found_file(path: Path, what: str) -> Path:
    """Return a file, or the one of this name that comes with dist_mem. Raises UnusableError if neither is there."""
    found = path if path.is_file() else shipped_path(str(path))
    if found is None or not is_file(found):
        raise UnusableError(f"there is no file {path}: give the YAML file of {what}")
    if found != path:
        say_where_from(str(path), found)
    return found


def _combinations(sweep: Sweep, path: Path) -> dict[str, list[str]]:
    """Return the rows of the grid: name -> overrides."""
    empty = [key for key, values in sweep.grid.items() if not values]
    if empty:
        raise UnusableError(f"{path}: grid.{empty[0]} has no values")
    for number, condition in enumerate(sweep.skip):
        _check_condition(condition, sweep, where=f"{path}: skip[{number}]")
    rows = {}
    for values in itertools.product(*sweep.grid.values()) if sweep.grid else ():
        chosen = dict(zip(sweep.grid, values, strict=True))
        if any(all(_names(chosen[key], value) for key, value in condition.items()) for condition in sweep.skip):
            continue
        name = "-".join(_label(key, value) for key, value in chosen.items())
        if name in rows or name in sweep.rows:
            raise UnusableError(f"{path}: two rows are called {name!r}: give one of them under rows, with another name")
        rows[name] = [word for key, value in chosen.items() for word in _arguments(key, value)]
    return rows


def _check_condition(condition: dict[str, Any], sweep: Sweep, *, where: str) -> None:
    for key, value in condition.items():
        if key not in sweep.grid:
            close = nearest(key, list(sweep.grid))
            meant = f"; did you mean {close}?" if close else ""
            raise UnusableError(f"{where} has {key!r}, which is not a key of the grid{meant}")
        if not any(_names(one, value) for one in sweep.grid[key]):
            raise UnusableError(f"{where}: {key} never has the value {value!r}; it has {sweep.grid[key]}")


def _names(value: Any, given: Any) -> bool:
    """Return whether a condition means this value: equal, or the name of its file."""
    return bool(value == given) or (_is_file(value) and Path(value).stem == given)


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def _arguments(key: str, value: Any) -> list[str]:
    """Return the arguments of `dist-mem train` that set a value."""
    if _is_file(value):
        return [value]
    if "." not in key and isinstance(value, list):  # overrides that belong together
        return [str(word) for word in value]
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}"]


def _label(key: str, value: Any) -> str:
    """Return the part of a row's name: none, lr0.001."""
    if _is_file(value):
        return Path(value).stem
    text = " ".join(str(word) for word in value) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.:]+", "_", f"{key.rpartition('.')[2]}{text}").strip("_")

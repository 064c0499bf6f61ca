"""The grid of a study: values of keys whose combinations are rows.

grid:                                            # every combination is a row
  memory: [configs/memory/none.yaml, configs/memory/transformer_xl.yaml]
  optimizer.lr: [0.001, 0.002]
skip: [{memory: none, optimizer.lr: 0.002}]      # but not these
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dist_mem.config import Config
from dist_mem.config.check import nearest
from dist_mem.config.keys import find_key
from dist_mem.config.values import Letters, convert_letters, untyped_values
from dist_mem.errors import UnusableError

Grid = Mapping[str, Sequence[Any]]  # key -> values
Choice = tuple[tuple[str, Any], ...]  # a value of each key


def settle_grid(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a study with the values of its grid as the keys of a configuration read them."""
    grid, skip = tree.get("grid"), tree.get("skip")
    if isinstance(grid, Mapping):
        lists = {
            key: [_value(key, each) for each in values] for key, values in grid.items() if isinstance(values, list)
        }
        tree = {**tree, "grid": {**grid, **lists}}
    if isinstance(skip, list):
        tree = {**tree, "skip": [_condition(each) if isinstance(each, Mapping) else each for each in skip]}
    return cast(dict[str, Any], untyped_values(tree))


def _condition(written: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(key, value) for key, value in written.items()}


def _value(key: str, written: Any) -> Any:
    """Return a value by the type of its key; an option of a memory, whose type is not known here, keeps its letters."""
    found = find_key(Config, key)
    value = untyped_values(written if found is None else convert_letters(found.schema, written, key))
    is_other = isinstance(written, Letters) and found is None and json.dumps(value) != written
    return str(written) if is_other else value


def choices(grid: Grid) -> Iterator[Choice]:
    """Yield every combination of the values of a grid."""
    return (tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def combinations(
    grid: Grid, skip: Sequence[dict[str, Any]], *, taken: Collection[str], where: str
) -> dict[str, list[str]]:
    """Return the rows of the grid: name -> overrides.

    Args:
        taken: names of other rows.

    Raises:
        UnusableError: a key has no values, two rows have one name, or `skip` names what the grid does not have.
    """
    empty = [key for key, values in grid.items() if not values]
    if empty:
        raise UnusableError(f"{where}grid.{empty[0]} has no values")
    for number, condition in enumerate(skip):
        _check_condition(condition, grid, where=f"{where}skip[{number}]")
    rows: dict[str, list[str]] = {}
    for chosen in map(dict, choices(grid) if grid else ()):
        if any(all(_names(chosen[key], value) for key, value in condition.items()) for condition in skip):
            continue
        name = "-".join(_label(key, value) for key, value in chosen.items())
        if name in rows or name in taken:
            raise UnusableError(f"{where}two rows are called {name!r}: give one of them under rows, with another name")
        rows[name] = [word for key, value in chosen.items() for word in _arguments(key, value)]
    return rows


def _check_condition(condition: dict[str, Any], grid: Grid, *, where: str) -> None:
    for key, value in condition.items():
        if key not in grid:
            close = nearest(key, list(grid))
            meant = f"; did you mean {close}?" if close else ""
            raise UnusableError(f"{where} has {key!r}, which is not a key of the grid{meant}")
        if not any(_names(one, value) for one in grid[key]):
            raise UnusableError(f"{where}: {key} never has the value {value!r}; it has {grid[key]}")


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
    return [override(key, value)]


def override(key: str, value: Any) -> str:
    """Return the override that sets a key to a value: optimizer.betas=[0.9, 0.95]."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _label(key: str, value: Any) -> str:
    """Return the part of a row's name: none, lr0.001."""
    if _is_file(value):
        return Path(value).stem
    text = " ".join(str(word) for word in value) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.:]+", "_", f"{key.rpartition('.')[2]}{text}").strip("_")


def trial_label(value: Any) -> str:
    """Return the part of a trial's name, which names files too: 0.001, or 0.9 0.999 for a list."""
    return re.sub(r"[^\w.:+-]+", " ", str(value)).strip()

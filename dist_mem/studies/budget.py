"""Equal budgets: overrides that give every row of a study the same tokens, FLOPs, parameters or bytes of memory.

    budget: {flops: 3e15, state_bytes: 98304}
    fit: {params: model.d_inner, state_bytes: {transformer_xl: memory.mem_len, compressive: memory.cmem_len}}

`tokens` or `flops` of the training sets `train.steps`. `params` and `state_bytes` (of a lane) set the key that `fit`
names, of all rows or of each; a row without one keeps its size, and the results show what everyone has. Most
sizes grow in proportion to such a key, so two counts give the value; where the result is not on their line, as
parameters over `model.d_model`, it is found by bisection. It is a multiple of `train.seg_len`, or of 8 for a width.

A budget of FLOPs is one of matrix products and torch's convolutions. The table also has all multiplications and
additions; they set no steps, so that a row keeps its steps, and its finished cells, when more of them are counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.block import model_spec
from dist_mem.config import Config, ConfigError, as_tree
from dist_mem.config.blocks import value_at
from dist_mem.config.keys import DRAW, PLACE
from dist_mem.config.settings import metadata_of
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import NotCountedError, Operations, operations_per_token
from dist_mem.estimate.dry_run import check_model
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.runtime.figures import NO_FIGURE
from dist_mem.studies.runs import all_runs, train_words
from dist_mem.studies.study import FITTED, Study

_NAMES = {"params": "num_parameters", "state_bytes": "state_bytes_per_lane"}  # of FITTED, in `describe`
_WIDTH_STEP = 8
UNKNOWN_STEPS = "train.steps=99999999"  # the most; in place of those of the files, which a curriculum may exceed

Load = Callable[[Sequence[str]], Config]


class Costs(NamedTuple):
    """What a row takes within its budget."""

    parameters: int
    state_bytes: int  # of a lane
    steps: int
    tokens: int
    flops: int | None  # of the training's products, the budget's; None: the memory does not run on meta tensors
    all_flops: int | None  # with the training's other multiplications and additions, as triangular systems

    def texts(self) -> list[str]:
        """Return a cell for each of `HEADING`."""
        flops = (NO_FIGURE if count is None else f"{count:.4g}" for count in (self.flops, self.all_flops))
        return [*(f"{size:,}" for size in (self.parameters, self.state_bytes, self.steps, self.tokens)), *flops]


HEADING = ["parameters", "bytes of memory per lane", "steps", "tokens", "FLOPs of products", "all FLOPs"]  # of `Costs`


def apply_budget(study: Study, load: Load, vocab_size: int | None = None) -> dict[str, Costs]:
    """Give every row of a study its budget, and return what each takes; nothing without a budget.

    Args:
        load: returns the configuration of some words.  vocab_size: None: that of the data if they are built.

    Raises:
        UnusableError: the budget is too small, a key changes no size, or a memory's FLOPs cannot be counted.
    """
    costs = {}
    found: dict[tuple[str, ...], tuple[list[str], Costs]] = {}  # rates tried for a row do not change what it takes
    for run in all_runs(study, Path(), study.seeds[:1]) if study.budget else ():
        name, words = study.candidates.get(run.row, run.row), train_words(study, run, ())
        sized = (name, *filter(_changes_a_size, words))
        if sized not in found:
            try:
                found[sized] = fit_budget(name, words, study.budget, study.fit, load, vocab_size)
            except ConfigError as error:
                raise UnusableError(f"{study.path}: row {run.row}: {error}") from error
            except UnusableError as error:
                raise UnusableError(f"{study.path}: {error}") from error
        added, costs[run.row] = found[sized]
        study.trained_rows[run.row] += added
    return costs


def _changes_a_size(word: str) -> bool:
    """Return whether a word of a training, a file or an override, may change what the training takes."""
    key = word.partition("=")[0]
    is_frozen = key.startswith("optimizer.groups")  # it may be: the backward of frozen weights takes less
    is_rate = key.startswith(("optimizer.", "schedule.")) and not is_frozen
    return metadata_of(key).affects not in (DRAW, PLACE) and not is_rate


def fit_budget(
    name: str,
    words: Sequence[str],
    budget: Mapping[str, float],
    fit: Mapping[str, Any],
    load: Load,
    vocab_size: int | None = None,
) -> tuple[list[str], Costs]:
    """Return the overrides that give a row the budget, and what it then takes; arguments as in `apply_budget`."""
    added: list[str] = []
    for size in (size for size in FITTED if size in budget):
        key = fit[size].get(name) if isinstance(fit[size], Mapping) else fit[size]
        if key is not None:
            sized = [*words, *added, UNKNOWN_STEPS]
            added.append(_fit_size(name, sized, str(key), size, budget[size], load, vocab_size))
    config = load([*words, *added, UNKNOWN_STEPS])
    sizes = check_model(config, vocab_size)
    train = config.train
    per_step = train.global_batch_size * train.seg_len * train.segments_per_update
    per_token: Operations | None = None
    try:
        per_token = operations_per_token(model_spec(config, vocab_size or vocab_size_of(config.data, config.model)))
    except NotCountedError as error:
        if "flops" in budget:
            raise UnusableError(f"{name}: budget.flops needs the FLOPs of the memory; give tokens: {error}") from error
    cost = per_step * (per_token.products.training if "flops" in budget and per_token is not None else 1)
    steps = int(budget["flops" if "flops" in budget else "tokens"] // cost)
    if steps < 1:
        raise UnusableError(f"{name}: the budget is less than one update, which takes {cost:,}: give more")
    tokens = steps * per_step
    flops = [None, None] if per_token is None else [tokens * count.training for count in per_token]
    costs = Costs(sizes["num_parameters"], sizes["state_bytes_per_lane"], steps, tokens, *flops)
    return [*added, f"train.steps={steps}"], costs


def _fit_size(
    name: str, words: Sequence[str], key: str, size: str, wanted: float, load: Load, vocab_size: int | None
) -> str:
    """Return the override of `key` whose size is nearest to the wanted one."""
    config = load(words)
    unit = config.train.seg_len if size == "state_bytes" else _WIDTH_STEP
    if key == "model.d_model" and config.model.d_head is None:  # heads divide the width
        unit = math.lcm(unit, config.model.num_heads)
    now = value_at(as_tree(config), key)
    if not isinstance(now, int):
        raise UnusableError(f"{name}: fit.{size} is {key}, which is {now!r} there and no whole number")

    @cache
    def measure(number: int) -> int:
        """Return the size with so many units."""
        return int(check_model(load([*words, f"{key}={number * unit}"]), vocab_size)[_NAMES[size]])

    low, high = 4, 8
    first, second = measure(low), measure(high)
    if first == second:
        raise UnusableError(f"{name}: fit.{size} is {key}, which does not change it: it is {first:,} in any case")
    per_unit = (second - first) / (high - low)
    number = low + (wanted - first) / per_unit
    if number < 0.5:
        smallest = f"the smallest {key}, {unit}, has {measure(1):,}"
        raise UnusableError(f"{name}: budget.{size} is {wanted:g}, but {smallest}: give more")
    nearest = max(1, round(number))
    if abs(measure(nearest) - wanted) > abs(per_unit):  # not on the line
        nearest = _bisect(measure, wanted, nearest)
    return f"{key}={nearest * unit}"


def _bisect(measure: Callable[[int], int], wanted: float, guess: int) -> int:
    """Return the number >= 1 whose size, which grows with it, is nearest to the wanted one."""
    most = guess
    while measure(most) < wanted:
        most *= 2
    above = 1 + bisect_left(range(1, most), wanted, key=measure)
    return min((max(1, above - 1), above), key=lambda number: abs(measure(number) - wanted))

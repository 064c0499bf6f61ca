"""Equal budgets: overrides that give every memory of an arena the same tokens, FLOPs, parameters or bytes of memory.

    budget: {flops: 3e15, state_bytes: 98304}
    fit: {params: model.d_inner, state_bytes: {transformer_xl: memory.mem_len, compressive: memory.cmem_len}}

`tokens` or `flops` of the training sets `train.steps`. `params` and `state_bytes` (of a lane) set the key that `fit`
names, of all memories or of each; a memory without one keeps its size, and the results show what everyone has. Both
sizes grow in proportion to such a key, so two counts give the value, which is rounded to what a key of lengths takes:
a multiple of `train.seg_len`, or of 8 for a width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from dist_mem.config import Config
from dist_mem.errors import UnusableError

WORK = {"tokens": "tokens", "flops": "FLOPs of the training"}  # what sets the steps
SIZES = {"params": "num_parameters", "state_bytes": "state_bytes_per_lane"}  # budget -> name in `describe`
_WIDTH_STEP = 8

Load = Callable[[Sequence[str]], Config]
Describe = Callable[[Config], Mapping[str, int]]


class Costs(NamedTuple):
    """What a memory takes within its budget."""

    parameters: int
    state_bytes: int  # of a lane
    steps: int
    tokens: int
    flops: int | None  # of the training; None: the memory does not count its operations


def check_budget(budget: Mapping[str, float], fit: Mapping[str, Any], *, where: str) -> None:
    """Raise UnusableError for a budget that says not exactly how long to train, or sizes that nothing fits."""
    unknown = [name for name in budget if name not in (*WORK, *SIZES)]
    if unknown:
        raise UnusableError(f"{where}: budget has {unknown[0]!r}, but must be of {', '.join((*WORK, *SIZES))}")
    if sum(name in budget for name in WORK) != 1:
        raise UnusableError(f"{where}: budget must have exactly one of {' and '.join(WORK)}, which sets train.steps")
    for name in (name for name in SIZES if (name in budget) != (name in fit)):
        raise UnusableError(f"{where}: {name} must be both in budget, the size, and in fit, the key that sets it")
    if small := [name for name, value in budget.items() if value <= 0]:
        raise UnusableError(f"{where}: budget.{small[0]} is {budget[small[0]]:g}, but must be above 0")


def fitted(
    name: str, words: Sequence[str], budget: Mapping[str, float], fit: Mapping[str, Any], load: Load, describe: Describe
) -> tuple[list[str], Costs]:
    """Return the overrides that give a memory the budget, and what it then takes.

    Args:
        name: of the memory.  words: its configurations and overrides.
        load: returns the configuration of some words.  describe: returns its sizes, as `model.describe`.

    Raises:
        UnusableError: the budget is too small, a key changes no size, or the memory counts no FLOPs.
    """
    added: list[str] = []
    for size in (size for size in SIZES if size in budget):
        key = fit[size].get(name) if isinstance(fit[size], Mapping) else fit[size]
        if key is not None:
            added.append(_fit_size(name, [*words, *added], str(key), size, budget[size], load, describe))
    config = load([*words, *added])
    sizes = describe(config)
    train = config.train
    per_step = train.global_batch_size * train.seg_len * train.segments_per_update
    per_token = sizes.get("training_flops_per_token")
    if "flops" in budget and per_token is None:
        raise UnusableError(f"{name}: budget.flops needs the FLOPs of its memory, which has no flops(); give tokens")
    cost = per_step * (per_token if "flops" in budget and per_token is not None else 1)
    steps = int(budget["flops" if "flops" in budget else "tokens"] // cost)
    if steps < 1:
        raise UnusableError(f"{name}: the budget is less than one update, which takes {cost:,}: give more")
    flops = None if per_token is None else per_token * per_step * steps
    costs = Costs(sizes["num_parameters"], sizes["state_bytes_per_lane"], steps, steps * per_step, flops)
    return [*added, f"train.steps={steps}"], costs


def _fit_size(
    name: str, words: Sequence[str], key: str, size: str, wanted: float, load: Load, describe: Describe
) -> str:
    """Return the override of `key` whose size is nearest to the wanted one."""
    config = load(words)
    unit = config.train.seg_len if size == "state_bytes" else _WIDTH_STEP
    now = OmegaConf.select(config, key)  # type: ignore[arg-type]  # a DictConfig of that schema
    if not isinstance(now, int):
        raise UnusableError(f"{name}: fit.{size} is {key}, which is {now!r} there and no whole number")
    low, high = 4 * unit, 8 * unit
    first, second = (describe(load([*words, f"{key}={value}"]))[SIZES[size]] for value in (low, high))
    if first == second:
        raise UnusableError(f"{name}: fit.{size} is {key}, which does not change it: it is {first:,} in any case")
    value = low + (wanted - first) * (high - low) / (second - first)
    if value < unit / 2:
        least = describe(load([*words, f"{key}={unit}"]))[SIZES[size]]
        smallest = f"the smallest {key}, {unit}, has {least:,}"
        raise UnusableError(f"{name}: budget.{size} is {wanted:g}, but {smallest}: give more")
    return f"{key}={round(value / unit) * unit}"

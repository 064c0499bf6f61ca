"""Definition of an arena: memories at an equal budget, as a table of one scale.

title: Which memory?
train: [configs/demo.yaml]                       # configurations and overrides of all memories
memories:                                        # name -> its configurations and overrides
  none: [configs/memory/none.yaml]
  transformer_xl: [configs/memory/transformer_xl.yaml]
budget: {tokens: 4e6}                            # see budget.py
learning_rates: [0.001, 0.002]                   # each memory has the best of them on validation
seeds: [0, 1, 2]
columns: {perplexity: {figure: word_perplexity}}
data: data/sample
build: [[dist-mem, data, build, sample, --out, data/sample]]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from dist_mem.config import read_block
from dist_mem.errors import UnusableError
from dist_mem.studies.budget import check_budget
from dist_mem.studies.grid import MAX_RUNS, check_number, found_file
from dist_mem.studies.tables import Column, Point, Row, Scale, Table, check_table

SCALE = "arena"  # name of the only scale of its table


@dataclass
class Arena:
    """The keys of the file."""

    title: str = ""
    train: list[str] = field(default_factory=list)
    memories: dict[str, list[str]] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)  # empty: that of `train`
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    columns: dict[str, Column] = field(default_factory=dict)
    data: str = MISSING
    build: list[list[str]] = field(default_factory=list)  # commands that build missing data


def load_arena(path: Path, *, max_runs: int = MAX_RUNS) -> tuple[Arena, Table]:
    """Read an arena, also one that comes with dist_mem, and return it with its table, whose rows lack the budget.

    Raises:
        UnusableError: there is no such file, it is invalid, or it has more runs than `max_runs`; the message names the
            file and the key.
    """
    found = found_file(path, "an arena")
    arena: Arena = read_block(Arena, found)
    if len(arena.memories) < 2:
        raise UnusableError(f"{path}: memories has {len(arena.memories)}; give at least two, to compare")
    num_rows = len(arena.memories) * max(1, len(arena.learning_rates))
    check_number(num_rows, arena.seeds, max_runs, where=str(path))
    check_budget(arena.budget, arena.fit, where=str(path))
    for column, settings in arena.columns.items():
        for word in (word for word in settings.evaluate if word.startswith("data.path=")):
            # Checksums and intervals are of one report.
            raise UnusableError(
                f"{path}: columns.{column}.evaluate has {word!r}, but an arena scores all columns on its own data: "
                "compare other data by a sweep"
            )
    trained = {name: _trained(name, arena) for name in arena.memories}
    rows = {name: Row(name=name, best_of=list(each) if len(each) > 1 else []) for name, each in trained.items()}
    others = {one: Row(name=one) for each in trained.values() if len(each) > 1 for one in each}
    table = Table(
        path=str(found),
        title=arena.title or path.stem,
        source=f"dist-mem arena {path}",
        rows={**rows, **others},
        columns=arena.columns or {"word_perplexity": Column("word_perplexity")},
    )
    table.scales[SCALE] = Scale(
        about=f"Budget of each: {', '.join(f'{value:g} {name}' for name, value in arena.budget.items())}.",
        train=arena.train,
        rows={one: words for each in trained.values() for one, words in each.items()},
        seeds=arena.seeds,
        points={"": Point(data=arena.data, build=arena.build)},
        name=SCALE,
    )
    check_table(table)
    return arena, table


def memory_of_row(arena: Arena, row: str) -> str:
    """Return the memory of a row that is trained: of `infini lr 0.001`, `infini`."""
    return next(name for name in arena.memories if row in _trained(name, arena))


def _trained(name: str, arena: Arena) -> dict[str, list[str]]:
    """Return the trainings of a memory: row -> its configurations and overrides."""
    words = arena.memories[name]
    if len(arena.learning_rates) < 2:
        return {name: [*words, *(f"optimizer.lr={rate}" for rate in arena.learning_rates)]}
    return {f"{name} lr {rate:g}": [*words, f"optimizer.lr={rate}"] for rate in arena.learning_rates}

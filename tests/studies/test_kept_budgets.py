"""Budgets of the arenas give every row the updates for which its kept cells were trained."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from dist_mem.config import load_config
from dist_mem.memory import memory_options
from dist_mem.studies.budget import apply_budget
from dist_mem.studies.study import load_study
from tests.support.paths import ROOT

VOCABULARIES = {"data/sample": 1280, "data/pg19_4000": 4000}
SPECS = [
    path for path in sorted((ROOT / "configs" / "arena").glob("*.yaml")) if "flops" in load_study(str(path)).budget
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_a_budget_of_flops_gives_the_updates_of_the_kept_cells(spec: Path) -> None:
    """What else is counted must not change them: the cells would be of another definition."""
    study = load_study(str(spec))
    (point,) = study.points.values()
    load = partial(load_config, memory_options=memory_options)
    costs = apply_budget(study, load, VOCABULARIES[point.data])
    for row, each in costs.items():
        assert each.flops and each.all_flops and 1.0 < each.all_flops / each.flops < 1.1, row
    named = re.search(r"--cells (\S+)", spec.read_text(encoding="utf-8"))
    assert named is not None, f"{spec} does not say where its cells are kept"
    cells = {path.stem: json.loads(path.read_bytes()) for path in (ROOT / named[1]).glob("*-seed*.json")}
    trained = {name: cell["definition"]["train.steps"] for name, cell in cells.items()}
    assert {name: costs[name.rpartition("-seed")[0]].steps for name in trained} == trained

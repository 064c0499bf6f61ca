"""The kept cells of the arenas are of the definitions that their files have now, so that each call takes them over."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from dist_mem.config import load_config
from dist_mem.memory import memory_options
from dist_mem.studies.budget import apply_budget
from dist_mem.studies.cells import CellRun
from dist_mem.studies.definition import compare
from dist_mem.studies.runs import definition_of
from dist_mem.studies.study import load_study
from tests.support.paths import ROOT

VOCABULARIES = {"data/sample": 1280, "data/pg19_4000": 4000}
AWAITED = {"pg19"}  # no cell is trained yet
SPECS = sorted((ROOT / "configs" / "arena").glob("*.yaml"))


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_the_kept_cells_are_of_the_definitions_of_now(spec: Path) -> None:
    """What a new version counts, or a key that it adds, must not change them."""
    study = load_study(str(spec))
    (point,) = study.points.values()
    costs = {}
    if study.budget:
        size = VOCABULARIES.get(point.data, 64)
        costs = apply_budget(study, partial(load_config, memory_options=memory_options), size)
    for row, each in costs.items() if "flops" in study.budget else ():
        assert each.flops and each.all_flops and 1.0 < each.all_flops / each.flops < 1.1, row
    named = re.search(r"--cells (\S+)", spec.read_text(encoding="utf-8"))
    assert named is not None, f"{spec} does not say where its cells are kept"
    assert bool(list((ROOT / named[1]).glob("*-seed*.json"))) == (spec.stem not in AWAITED), named[1]
    for row in study.trained_rows:
        path = next((ROOT / named[1]).glob(f"{row}-seed*.json"), None)
        if path is None:
            continue
        kept = json.loads(path.read_bytes())["definition"]
        tuned = {*study.tune.grid, *study.tune.rows.get(row, {})}
        words = [f"{key}={json.dumps(kept[key])}" for key in tuned]
        now = definition_of(study, CellRun(row, "", kept["train.seed"], Path("out")), words)
        compare(kept, now, path.name, "")

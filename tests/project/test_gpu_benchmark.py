"""The benchmark of GPUs runs whole on CPUs, survives cases that fail, and continues where it was ended."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dist_mem.config import Config
from dist_mem.config.keys import find_key
from dist_mem.memory import memory_kinds
from tests.support.limits import limit
from tests.support.paths import ROOT


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("lib.gpu_cases")


def test_every_memory_is_measured_with_every_back_end(cases: ModuleType) -> None:
    found = list(cases.all_cases(["125m"], only=[], attentions=[], compiles=["no", "yes"]))
    assert len(found) == len(set(found))
    blocks = cases.memories(8)
    kinds = {blocks[one.memory]["kind"] for one in found if one.memory != "causal"} | {"causal"}
    assert kinds == set(memory_kinds())
    if key := find_key(Config, "model.attention"):
        assert {one.attention for one in found} == set(key.metadata.choices) - {"auto"}
    assert {one.compiled for one in found} == ({False, True} if find_key(Config, "train.compile") else {False})


def test_case_without_room_is_tried_with_half_of_its_lanes(
    cases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: Any, plan: Any, micro_lanes: int | None = None) -> dict[str, Any]:
        return {"status": "done" if micro_lanes == 4 else "out of memory", "micro_lanes": micro_lanes}

    monkeypatch.setattr(cases, "measure", measure)
    plan = cases.Plan(tmp_path, 10, 40, 60.0, False, [])
    results = list(cases.until_it_fits(cases.Case("125m", "lamemo", "simple", False), plan))
    assert [one["micro_lanes"] for one in results] == [None, 8, 4]
    assert [one["status"] for one in results] == ["out of memory", "out of memory", "done"]


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--cpu", "--tiny", "--out", str(out)]
    command += ["--attention", "simple", "--compile", "no", "--memories", "transformer_xl", *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=out, capture_output=True, text=True, timeout=limit(240), check=False
    )


@pytest.mark.slow
def test_benchmark_runs_whole_on_a_cpu_and_survives_a_case_that_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "--sizes", "transformer_xl_base")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "gpu.json").read_text())
    (case,) = first["cases"]
    assert case["status"] == "done", case
    assert case["tokens_per_second"] > 0 and case["peak_memory_gb"] > 0
    assert "0 FAIL" in first["machine"]["doctor"]
    more = run(tmp_path, "--sizes", "transformer_xl_base,125m", "model.num_heads=5")
    assert more.returncode == 0, "what is measured is kept"
    second = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert second[0] == case, "and not measured again"
    assert [(one["status"], one["exit_code"]) for one in second[1:]] == [("refused", 2)]
    assert "num_heads" in second[1]["output"]
    table = (tmp_path / "gpu.md").read_text()
    assert table in more.stdout
    assert len(table.splitlines()) == 2 + len(second)

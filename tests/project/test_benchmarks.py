"""Benchmarks: steps that are timed repeat for every memory; that of GPUs runs whole on CPUs, also when interrupted."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dist_mem.memory import memory_kinds
from dist_mem.runtime.devices import device_named
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT
from tests.support.small_studies import ARENA, write

CAN_COMPILE = torch.backends.cuda.is_built() and find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("lib.gpu_cases")


def test_every_memory_is_timed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed = importlib.import_module("lib.speed")
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_head": 4, "d_inner": 8}
    arguments = argparse.Namespace(**sizes, seg_len=16, mem_len=16, lanes=2, vocab=11)
    blocks = speed.memories(16)
    assert {block["kind"] for block in blocks.values()} == set(memory_kinds()) - {"causal"}
    for block in blocks.values():
        step, _ = speed.training_step(block, torch.float32, arguments, torch.device("cpu"))
        step()


def test_an_update_with_muon_is_timed_beside_one_with_adamw() -> None:
    command = [sys.executable, "benchmarks/muon.py", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    width, tokens, *seconds = done.stdout.splitlines()[-1].split()[:5]
    assert (width, tokens) == ("16", "32") and all(float(figure) > 0 for figure in seconds)


def test_rows_of_an_arena_are_timed_and_those_of_the_file_are_kept(tmp_path: Path) -> None:
    sizes = ["model.num_layers=1", "model.d_model=8", "model.num_heads=2", "model.d_inner=8", "train.seg_len=8"]
    spec, out = write(tmp_path, ARENA, train=sizes, budget={"flops": 1e9}), tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/rows.py", spec, "--out", str(out), "--vocab-size", "11"]
    command += ["--rounds", "1", "--updates", "2", "--rows"]
    for rows in (["none"], list(ARENA["rows"])):
        before = json.loads(out.read_text()) if out.exists() else {}
        done = subprocess.run([*command, *rows], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(out.read_text())
        assert set(found) == set(rows) and found | before == found
    for each in found.values():
        update = each["flops"] / each["steps"]
        assert each["flops"] <= 1e9 < each["flops"] + update and each["flops"] < each["all_flops"]
        assert each["training_seconds"] == each["steps"] * each["update_seconds"] > 0.0


@pytest.mark.nightly
@pytest.mark.skipif(not CAN_COMPILE, reason="needs torch's CUDA build with Triton, and no GPU")
@pytest.mark.parametrize("case", ["attention by distance", "block of transformer_xl"])
def test_kernels_compile_for_a_gpu_that_this_machine_need_not_have(case: str) -> None:
    sizes = "--seg-len 128 --mem-len 128 --lanes 1 --d-model 64 --num-heads 1 --d-inner 64"
    command = [sys.executable, "benchmarks/kernels.py", *sizes.split(), "--cases", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_memory_is_checked_and_measured_and_numbers_come_first(cases: ModuleType) -> None:
    names = [case.name for case in cases.all_cases()]
    assert len(names) == len(set(names))
    blocks = importlib.import_module("lib.gpu_models").every_memory(8)
    presets = {path.stem for path in (ROOT / "configs" / "memory").glob("*.yaml") if "kind: linear" in path.read_text()}
    assert presets < set(blocks) and len(presets) == 6
    for first in ("memory", "speed 125m"):
        assert {block["kind"] for block in blocks.values()} == set(memory_kinds())
        assert {f"{first} {name}" for name in blocks} <= set(names), first
    kinds = [name.split()[0] in ("memory", "attention") for name in names]
    assert kinds == sorted(kinds, reverse=True)


def test_a_kernel_has_a_floor_that_is_counted_without_a_device(cases: ModuleType) -> None:
    kernels, device = importlib.import_module("lib.gpu_kernels"), device_named("h100")
    floors = {name: kernels.floor_of(make, True, device) for name, make in kernels.CASES.items() if "fla's" not in name}
    assert min(floors.values()) > 0.0
    ours, table = (floors[f"attention by distance, M 1024, K 64: {name}"] for name in ("triton", "sdpa"))
    assert ours < table


@pytest.mark.parametrize("status", ["done", "passed", "failed", "too slow"])
def test_every_row_of_the_page_has_the_cells_of_its_head(status: str, cases: ModuleType) -> None:
    numbers = {"tokens_per_second": 1e5, "step_seconds": 0.1, "peak_memory_gb": 2.0, "busy_share": 0.9}
    numbers |= {"forward_ms": 1.0, "both_ms": 3.0, "floor_ms": 0.5, "compile_seconds": 20.0}
    made = {case.name: {"status": status, **numbers} for case in cases.all_cases()}
    counted = {
        each.name: {"memory": 2.1e9, "flops_per_token": 1e9, "floor": {"products": 0.05}} for each in cases.trainings()
    }
    page = cases.tables(made, {"card": "NVIDIA H100 80GB HBM3", "versions": {}}, counted)
    width = 0
    for line in page.splitlines():
        if line.startswith("|"):
            cells = line.count("|")
            assert cells == (width or cells), line
        width = line.count("|")
    if status == "done":
        row = "| 125m causal compiled | 100,000 | 10.1% | 100.0 | 50.0 | 2.0 | 90% | 2.00 | 1.05 | compiled in 20 s |"
        assert row in page
        assert "| head, V 50257 | 1.00 | 3.00 | 0.50 | 6.0 | |" in page


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--cpu", "--tiny", "--out", str(out), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def results(out: Path) -> dict[str, Any]:
    path = out / "gpu.json"
    return dict(json.loads(path.read_text())["cases"]) if path.exists() else {}


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_benchmark_that_is_killed_continues_and_ends_with_all_cases_in_their_order(
    cases: ModuleType, tmp_path: Path
) -> None:
    """With some cases of each group."""
    only = ("--only", "^(memory|attention chunked|kernel head|peer plain|zero [012]$|two ranks zero 1|speed 125m kda$)")
    first = start(tmp_path, *only)
    wait_until(lambda: "zero 0" in results(tmp_path), "a few results", seconds=600)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=limit(60))
    before = results(tmp_path)
    second = start(tmp_path, "--minutes", "9", *only)
    printed, _ = second.communicate(timeout=limit(600))
    assert second.returncode == 0, printed
    after = results(tmp_path)
    assert {name: after[name] for name in before} == before, "what is made is not made again"
    assert list(after) == [case.name for case in cases.all_cases() if re.search(only[1], case.name)]
    assert (tmp_path / "gpu.md").read_text() in printed


def test_page_of_results_has_the_tables_of_its_json(cases: ModuleType) -> None:
    folder = ROOT / "docs" / "results"
    kept, counted = (json.loads((folder / "gpu" / f"{name}.json").read_text()) for name in ("gpu", "counted"))
    page = (folder / "gpu.md").read_text(encoding="utf-8")
    assert cases.tables(kept["cases"], kept["machine"], counted) in page

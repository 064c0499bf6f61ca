"""Benchmarks: steps that are timed repeat for every memory; that of GPUs runs whole on CPUs, also when interrupted."""

from __future__ import annotations

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
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT

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


@pytest.mark.nightly
@pytest.mark.skipif(not CAN_COMPILE, reason="needs torch's CUDA build with Triton, and no GPU")
@pytest.mark.parametrize("case", ["attention by distance", "block of transformer_xl"])
def test_kernels_compile_for_a_gpu_that_this_machine_need_not_have(case: str) -> None:
    sizes = "--seg-len 128 --mem-len 128 --lanes 1 --d-model 64 --num-heads 1 --d-inner 64"
    command = [sys.executable, "benchmarks/kernels.py", *sizes.split(), "--cases", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_memory_is_checked_and_measured_and_correctness_comes_first(cases: ModuleType) -> None:
    names = [case.name for case in cases.all_cases()]
    assert len(names) == len(set(names))
    blocks = cases.memories(8)
    for first in ("memory", "speed 125m"):
        found = {blocks[name]["kind"] for name in blocks if f"{first} {name}" in names}
        assert found | {"causal"} == set(memory_kinds()), first
    is_speed = [name.startswith("speed ") for name in names]
    assert is_speed == sorted(is_speed)


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
    """Without the models whose speed only larger sizes tell apart: of --tiny, all are the same."""
    only = ("--only", "memory|attention chunked|zero|repeat|resume|evaluation|speed transformer_xl_base")
    first = start(tmp_path, *only)
    wait_until(lambda: "zero 1" in results(tmp_path), "a few results", seconds=600)
    first.send_signal(signal.SIGKILL)
    first.wait()
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
    predicted = {name: one["memory"] for name, one in counted.items()}
    page = (folder / "gpu.md").read_text(encoding="utf-8")
    assert cases.tables(kept["cases"], kept["machine"], predicted) in page
    relative, rotary = (kept["cases"][f"speed 125m transformer_xl{kind}"] for kind in ("", ", rotary"))
    own = {each["name"]: float(each["Self CUDA"].removesuffix("ms")) for each in relative["operators"]}
    assert f"| FlexAttention, backward | {own['triton_tem_fused_flex_attention_backward_2']:.0f} |" in page
    assert f"| FlexAttention, forward | {own['triton_tem_fused_flex_attention_0']:.0f} |" in page
    assert f"are {rotary['tokens_per_second'] / relative['tokens_per_second']:.2f} times as fast" in page

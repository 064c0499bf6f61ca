"""Benchmarks on CPUs: the steps that they time repeat for every memory."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

import pytest
import torch

from dist_mem.memory import memory_kinds
from tests.support.paths import ROOT


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("lib.speed")


def test_every_memory_is_timed_over_several_steps(speed: ModuleType) -> None:
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_head": 4, "d_inner": 8}
    arguments = argparse.Namespace(**sizes, seg_len=16, mem_len=16, lanes=2, vocab=11)
    blocks = speed.memories(16)
    assert {block["kind"] for block in blocks.values()} == set(memory_kinds()) - {"causal"}
    for block in blocks.values():
        step, _ = speed.training_step(block, torch.float32, arguments, torch.device("cpu"))
        step()

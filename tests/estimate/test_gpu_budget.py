"""Bytes and kernels of an update on a GPU, counted without one, stay below what was reached.

`benchmarks/gpu.sh` measures these models (configs/speed/125m.yaml); each limit is a few percent above the count, so
that a copy of activations, or scores in memory, exceeds it.
"""

from __future__ import annotations

import pytest

from dist_mem.config import load_config
from dist_mem.estimate.counting import Counted, count_micro_batch
from tests.support.paths import ROOT

VOCAB_SIZE = 50_258
# memory: gigabytes that operations beside products move, kernels
BUDGETS = {"causal": (32, 650), "none": (37, 1_050), "transformer_xl": (48, 1_300), "lamemo": (92, 2_000)}
BUDGETS |= {"titans": (350, 15_000), "titans, chunks of 256": (365, 8_500)}
KEYS = {
    **{"causal": ["model.kind=gpt2", "model.num_positions=1024"], "none": [], "titans": ["memory.window=1024"]},
    "titans, chunks of 256": ["memory.window=1024", "memory.chunk_len=256"],
}


def counted(name: str) -> Counted:
    keys = [f"memory={{kind: {name.partition(',')[0]}}}", "train.precision=bf16"]
    keys += KEYS.get(name, ["memory.mem_len=1024"])
    return count_micro_batch(load_config([str(ROOT / "configs/speed/125m.yaml"), *keys]), VOCAB_SIZE)


@pytest.mark.parametrize("name", BUDGETS)
def test_an_update_moves_and_launches_no_more_than_its_budget(name: str) -> None:
    gigabytes, launches = BUDGETS[name]
    found = counted(name)
    moved = sum(number * work.num_bytes for number, work in found.kernels if not work.flops)
    assert moved < gigabytes * 1e9
    assert sum(number for number, _ in found.kernels) < launches
    if name == "titans":  # of products too, as states are read by them; what waits for the backward fits on a card
        assert sum(number * work.num_bytes for number, work in found.kernels) < 1_200e9
        assert found.peak < 25 * 2**30

"""Bytes and kernels of an update on a GPU, counted without one, stay below what was reached.

`benchmarks/gpu.sh` measures these models (configs/speed/125m.yaml); each limit is a few percent above the count, so
that a copy of activations, or scores in memory, exceeds it.
"""

from __future__ import annotations

import pytest

from dist_mem.config import load_config
from dist_mem.estimate.counting import count_micro_batch
from tests.support.paths import ROOT

VOCAB_SIZE = 50_258
# memory: gigabytes that operations beside products move, kernels
BUDGETS = {
    **{"causal": (32, 650), "none": (37, 1_050), "transformer_xl": (48, 1_300), "lamemo": (92, 2_000)},
    "linear": (76, 1_500),  # Gated DeltaNet, by flash-linear-attention's kernels
}
KEYS = {
    **{"causal": ["model.kind=gpt2", "model.num_positions=1024"], "none": []},
    "linear": ["memory.kernels=fla"],
}


@pytest.mark.parametrize("kind", BUDGETS)
def test_an_update_moves_and_launches_no_more_than_its_budget(kind: str) -> None:
    gigabytes, launches = BUDGETS[kind]
    keys = [f"memory={{kind: {kind}}}", "train.precision=bf16"]
    keys += KEYS.get(kind, ["memory.mem_len=1024"])
    counted = count_micro_batch(load_config([str(ROOT / "configs/speed/125m.yaml"), *keys]), VOCAB_SIZE)
    moved = sum(number * work.num_bytes for number, work in counted.kernels if not work.flops)
    assert moved < gigabytes * 1e9
    assert sum(number for number, _ in counted.kernels) < launches

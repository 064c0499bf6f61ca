"""Bytes and kernels of an update on a GPU, counted without one, stay below what was reached.

`benchmarks/gpu.sh` measures these models (configs/speed/125m.yaml); each limit is a few percent above the count, so
that a copy of activations, or scores in memory, exceeds it.
"""

import pytest

from dist_mem.block import model_spec
from dist_mem.config import load_config
from dist_mem.estimate.counting import count_micro_batch
from tests.support.paths import ROOT

VOCAB_SIZE = 50_258
GPT2 = ["model.kind=gpt2", "model.num_positions=1024"]
FULL = ["memory.mem_len=1024"]
SIGNAL = ["memory.num_basis=1024", "memory.num_samples=1024", "memory.basis_widths=[0.01,0.05]"]
# model: memory, other keys, gigabytes that operations beside products move, kernels
BUDGETS = {
    "causal": ("causal", GPT2, 25, 520),
    "none": ("none", [], 28, 870),
    "transformer_xl": ("transformer_xl", FULL, 36, 1_090),
    "rotary": ("transformer_xl", [*FULL, "memory.positions=rotary"], 77, 1_560),
    "lamemo": ("lamemo", FULL, 78, 1_810),
    "memorizing": ("memorizing", FULL, 51, 1_650),
    "infinite": ("infinite", SIGNAL, 46, 2_180),
    "infini": ("infini", [], 29, 950),
    "gated_deltanet": ("linear", ["memory.kernels=fla"], 72, 1_500),
    "titans": ("titans", ["memory.window=1024"], 330, 14_800),
    "titans, chunks of 256": ("titans", ["memory.window=1024", "memory.chunk_len=256"], 345, 8_080),
}


@pytest.mark.parametrize("model", BUDGETS)
def test_an_update_moves_and_launches_no_more_than_its_budget(model: str) -> None:
    kind, others, gigabytes, launches = BUDGETS[model]
    keys = [f"memory={{kind: {kind}}}", "train.precision=bf16", *others]
    found = count_micro_batch(model_spec(load_config([str(ROOT / "configs/speed/125m.yaml"), *keys]), VOCAB_SIZE))
    moved = sum(number * work.num_bytes for number, work in found.kernels if not work.flops)
    assert moved < gigabytes * 1e9
    assert sum(number for number, _ in found.kernels) < launches
    if model == "titans":  # of products too, as states are read by them; what waits for the backward fits on a card
        assert sum(number * work.num_bytes for number, work in found.kernels) < 1_200e9
        assert found.peak < 25 * 2**30

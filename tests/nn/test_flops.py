"""FLOPs by formula: equal to what torch counts in real steps, and to arithmetic that knows nothing of this code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dist_mem.config import AdaptiveConfig
from dist_mem.model import MemoryLM, describe
from dist_mem.nn.flops import Flops
from tests.support.contract_cases import CASES, SEG_LEN, rotated, small_model
from tests.support.tiny import tiny_config

REALISTIC = {
    "model": {"num_layers": 3, "d_model": 96, "num_heads": 4, "d_head": 20, "d_inner": 256, "dropout": 0.1},
    "train": {"seg_len": 48},
}
REALISTIC_CASES: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "transformer_xl": {"kind": "transformer_xl", "mem_len": 100},
    "compressive": {"kind": "compressive", "mem_len": 96, "cmem_len": 40, "compression_rate": 5},
    "lamemo": {"kind": "lamemo", "mem_len": 110},
    "block_recurrent": {"kind": "block_recurrent", "num_states": 20, "window": 16},
    "block_recurrent, lstm": {"kind": "block_recurrent", "num_states": 20, "gate": "lstm", "cell": "dual"},
    "infinite": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "sampling": "sticky"},
    "infinite, moments": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "density": "softmax_moments"},
    "infinite, gibbs": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "density": "gibbs"},
    "infinite, no gate": {"kind": "infinite", "num_basis": 64, "gate": False},
    "infinite over lamemo": {"kind": "infinite", "num_basis": 64, "over": {"kind": "lamemo", "mem_len": 96}},
}
VOCAB = 512
SEGMENTS_TO_FILL = 5


def counted(model: MemoryLM, targets: Tensor) -> Flops:
    """Return torch's count for one segment of every lane, with full memories; targets (B, T)."""
    num_lanes, seg_len = targets.shape
    tokens, valid_len = torch.zeros_like(targets), torch.full((num_lanes,), seg_len)
    state = model.init_state(torch.arange(num_lanes), "cpu", torch.float32)
    with torch.no_grad():
        for _ in range(SEGMENTS_TO_FILL):
            state = model(tokens, targets, valid_len, state=state).state
        with FlopCounterMode(display=False) as scoring:
            model(tokens, targets, valid_len, state=state)
    with FlopCounterMode(display=False) as training:
        output = model(tokens, targets, valid_len, state=state)
        (output.nll.mean() + sum(loss.sum() for loss in output.aux.values())).backward()
    return Flops(scoring.get_total_flops(), training.get_total_flops())


def of_one_lane(model: MemoryLM) -> Flops:
    flops = model.flops()
    assert flops is not None
    return flops.of_lanes(1)


def realistic(memory: dict[str, Any], **model_keys: Any) -> Any:
    config = tiny_config(REALISTIC, {"model": model_keys})
    config.memory = memory
    return config


@pytest.mark.parametrize(("case", "norm"), rotated(CASES, ["pre", "post"]))
def test_formulas_equal_torchs_count(case: str, norm: str) -> None:
    model = small_model(case, norm=norm)
    flops = model.flops()
    assert flops is not None
    for num_lanes in (1, 3):  # tables of distances are made once for all lanes
        targets = torch.zeros(num_lanes, SEG_LEN, dtype=torch.int64)
        assert flops.of_lanes(num_lanes) == counted(model, targets), f"{num_lanes} lanes"


@pytest.mark.slow
@pytest.mark.parametrize("memory", REALISTIC_CASES.values(), ids=REALISTIC_CASES)
def test_formulas_equal_torchs_count_at_other_widths(memory: dict[str, Any]) -> None:
    model = MemoryLM(realistic(memory), VOCAB)
    assert of_one_lane(model) == counted(model, torch.zeros(1, 48, dtype=torch.int64))


def test_adaptive_vocabulary_counts_its_first_bin() -> None:
    adaptive = AdaptiveConfig([100, 300], div_val=2)
    model = MemoryLM(realistic({"kind": "none"}, adaptive=adaptive), VOCAB)
    assert of_one_lane(model) == counted(model, torch.zeros(1, 48, dtype=torch.int64))


@pytest.mark.parametrize(("kind", "mem_len"), [("none", 0), ("transformer_xl", 100)])
def test_formulas_equal_plain_arithmetic(kind: str, mem_len: int) -> None:
    """Multiplications a token: weights met once a row, rows of the memory too, and three passes over the keys."""
    memory = {"kind": kind} | ({"mem_len": mem_len} if mem_len else {})
    per_row, keys_values, seg_len, num_keys = 4 * 96 * 80 + 2 * 96 * 256, 2 * 96 * 80, 48, 48 + mem_len
    layer = per_row + keys_values * mem_len / seg_len + 3 * num_keys * 80 + 96 * 80 * num_keys / seg_len
    facts = describe(realistic(memory), VOCAB, num_lanes=1)
    assert facts["scoring_flops_per_token"] == pytest.approx(2 * (3 * layer + 96 * VOCAB), rel=5e-3)
    assert 2.7 < facts["training_flops_per_token"] / facts["scoring_flops_per_token"] <= 3


def test_no_figure_is_made_up_for_a_memory_that_does_not_count() -> None:
    model = small_model("none")
    model.memories()[-1].flops = lambda: None  # type: ignore[method-assign]
    assert model.flops() is None

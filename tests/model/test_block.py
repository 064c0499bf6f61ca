"""Blocks in training: what is recomputed in the backward changes no bit, and keeps fewer activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dist_mem.block import model_spec, num_recomputed
from dist_mem.config import Config, change_config
from dist_mem.model import LMOutput, MemoryLM
from tests.support.small_models import LANES, VOCAB, one_segment, small_config

RECOMPUTED = [("blocks", 1.0), ("blocks", 0.5), ("attention", 1.0), ("feed_forward", 1.0)]
MODELS: list[dict[str, Any]] = [
    {"norm": "pre"},
    {"norm": "post"},
    {"kind": "gpt2", "num_positions": 8},
    {"kind": "llama", "num_kv_heads": 1},
    {"kind": "llama", "qk_norm": True, "sliding_window": 3, "rope": {"kind": "dynamic", "factor": 2.0}},
]


def model_of(recomputed: str, share: float, **keys: Any) -> MemoryLM:
    memory = {"kind": "causal"} if keys.get("kind") == "gpt2" else None
    config: Config = small_config(memory, dropout=0.2, **keys)
    config = change_config(
        config, {"train.activation_checkpointing": recomputed, "train.activation_checkpointing_share": share}
    )
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, VOCAB))


def learn(model: MemoryLM) -> tuple[LMOutput, int]:
    """Run forward and backward of one segment; return the output, and how many numbers were kept between the two."""
    tokens, targets, valid_len = one_segment()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    torch.manual_seed(3)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(tokens, targets, valid_len, state=model.init_state(torch.arange(LANES), "cpu", torch.float32))
    output.nll.sum().backward()
    return output, sum(kept.values())


@pytest.mark.parametrize("keys", MODELS, ids=str)
@pytest.mark.parametrize(("recomputed", "share"), RECOMPUTED)
def test_recomputing_changes_no_bit_and_keeps_less(recomputed: str, share: float, keys: dict[str, Any]) -> None:
    plain, saving = model_of("none", 1.0, **keys), model_of(recomputed, share, **keys)
    (one, most), (other, fewer) = learn(plain), learn(saving)
    assert torch.equal(one.nll, other.nll)
    assert fewer < most
    for first, second in zip(plain.parameters(), saving.parameters(), strict=True):
        assert first.grad is not None and second.grad is not None and torch.equal(first.grad, second.grad)


def test_more_is_kept_the_less_is_recomputed() -> None:
    kept = [learn(model_of(*case))[1] for case in [("blocks", 1.0), ("blocks", 0.5), ("none", 1.0)]]
    assert kept == sorted(kept)
    assert kept[0] < learn(model_of("attention", 1.0))[1] < kept[-1]


@pytest.mark.parametrize(
    ("layers", "share", "number"), [(4, 1.0, 4), (4, 0.5, 2), (3, 0.5, 2), (12, 0.01, 1), (10, 0.3, 3)]
)
def test_a_share_selects_whole_blocks_and_at_least_one(layers: int, share: float, number: int) -> None:
    assert num_recomputed(layers, share) == number

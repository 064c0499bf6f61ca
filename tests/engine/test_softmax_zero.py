"""Softmax in chunks under ZeRO: two ranks train as one that keeps all logits, with whole and adaptive vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dist_mem.nn import cross_entropy
from dist_mem.runtime.distributed import World
from tests.support.ranks import RankPool
from tests.support.tiny import VOCAB, full_parameters, run_steps, tiny_config, tiny_job

pytestmark = pytest.mark.ranks

STEPS = 3
TRAIN = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": 8, "max_grad_norm": 0.5}
MODELS: dict[str, dict[str, Any]] = {"tied": {}, "adaptive": {"adaptive": {"cutoffs": [10, 20], "div_val": 2}}}


def trained(world: World, name: str, stage: int, chunk: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step and the parameters after them; `chunk`: logits at a time, None: all."""
    config = tiny_config({"train": TRAIN, "optimizer": {"kind": "sgd", "lr": 0.1}, "model": MODELS[name]})
    limits = {"KEPT": 2**26} if chunk is None else {"KEPT": 0, "CHUNK": chunk}
    with patch.multiple(cross_entropy, **limits):
        job = tiny_job(config, world, stage=stage)
        outcomes = run_steps(job, first=0, last=STEPS)
        return [outcome.totals.nll for outcome in outcomes], full_parameters(job)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_on_two_ranks_train_as_whole_logits_on_one(
    rank_pool: Callable[[int], RankPool], name: str, stage: int
) -> None:
    losses, parameters = rank_pool(1).run(trained, name, 0, None)[0]
    for rank_losses, rank_parameters in rank_pool(2).run(trained, name, stage, 5 * VOCAB):
        torch.testing.assert_close(torch.tensor(rank_losses), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        for key, value in parameters.items():
            torch.testing.assert_close(rank_parameters[key], value, rtol=0, atol=1e-5, msg=key)

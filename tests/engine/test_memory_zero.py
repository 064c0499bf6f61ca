"""Every memory under every ZeRO stage on two ranks, where books end on one rank only, trains as on one rank.

So do other numbers of ranks, and vocabularies whose softmax is computed in chunks.
"""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dist_mem.config import change_config
from dist_mem.nn import cross_entropy
from dist_mem.runtime.distributed import World
from tests.support.contract_cases import CASES, in_turn
from tests.support.ranks import Pools
from tests.support.tiny import ADAM, TRAIN, VOCAB, full_parameters, run_steps, tiny_config, tiny_job

STEPS = 6  # memories fill in two segments; documents last three on average


Trained = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def trained(world: World, case: str, stage: int, changes: dict[str, Any]) -> Trained:
    """(loss, auxiliary loss) of every step, and the parameters after them."""
    config = tiny_config({"train": TRAIN, "optimizer": ADAM}, changes)
    config = change_config(config, {"memory": CASES[case]})
    job = tiny_job(config, world, stage=stage)
    outcomes = run_steps(job, first=0, last=STEPS)
    return [(outcome.totals.nll, outcome.totals.aux) for outcome in outcomes], full_parameters(job)


def trained_in_chunks(world: World, stage: int, changes: dict[str, Any]) -> Trained:
    """The same with few logits at a time."""
    with patch.multiple(cross_entropy, KEPT=0, CHUNK=5 * VOCAB):
        return trained(world, "transformer_xl", stage, changes)


@cache
def on_one_rank(pools: Pools, case: str) -> Trained:
    return pools(1).run(trained, case, 0, {})[0]


@pytest.mark.parametrize(("case", "stage"), in_turn(CASES, [0, 1, 2, 3]))
def test_two_ranks_of_every_stage_train_as_one(rank_pool: Pools, case: str, stage: int) -> None:
    """A parameter that nothing uses in a step is left as a step with gradient 0 leaves it: Adam would show it."""
    assert_equal(rank_pool(2).run(trained, case, stage, {}), on_one_rank(rank_pool, case))


@pytest.mark.parametrize("stage", [2, 3])
def test_documents_cut_from_their_end_train_on_two_ranks_as_on_one(rank_pool: Pools, stage: int) -> None:
    case, cut = "infinite, normed over causal", {"data": {"cut": "end"}}
    alone = rank_pool(1).run(trained, case, 0, cut)[0]
    assert_equal(rank_pool(2).run(trained, case, stage, cut), alone)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 1), (3, 2), (4, 0), (4, 3)])
def test_other_numbers_of_ranks_train_as_one(rank_pool: Pools, world_size: int, stage: int) -> None:
    """Three ranks do not divide eight lanes: the fourth lane group of two is idle."""
    eight: dict[str, Any] = {"train": {"global_batch_size": 8}}
    alone = rank_pool(1).run(trained, "transformer_xl", 0, eight)[0]
    assert_equal(rank_pool(world_size).run(trained, "transformer_xl", stage, eight), alone)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("model", [{}, {"adaptive": {"cutoffs": [10, 20], "div_val": 2}}], ids=["tied", "adaptive"])
def test_a_softmax_in_chunks_on_two_ranks_trains_as_whole_logits_on_one(
    rank_pool: Pools, model: dict[str, Any], stage: int
) -> None:
    alone = rank_pool(1).run(trained, "transformer_xl", 0, {"model": model})[0]
    assert_equal(rank_pool(2).run(trained_in_chunks, stage, {"model": model}), alone)


def assert_equal(of_ranks: list[Trained], alone: Trained) -> None:
    losses, parameters = alone
    for rank_losses, rank_parameters in of_ranks:
        torch.testing.assert_close(torch.tensor(rank_losses), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        assert rank_parameters.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(rank_parameters[name], value, rtol=0, atol=1e-4, msg=name)


def losses_in_bf16(world: World, stage: int, optimizer: dict[str, Any]) -> list[float]:
    config = tiny_config({"optimizer": optimizer, "train": {"precision": "bf16", "micro_batch_size": 2}})
    return [outcome.totals.nll for outcome in run_steps(tiny_job(config, world, stage=stage), first=0, last=4)]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_bf16_without_zero_trains_as_at_stage_1(rank_pool: Pools, kind: str) -> None:
    """DeepSpeed's optimizer for it makes a step of its own at the start: weights decayed, Adam's count one ahead."""
    optimizer = {"kind": kind, "lr": 0.02, "weight_decay": 0.5}
    found = [rank_pool(2).run(losses_in_bf16, stage, optimizer)[0] for stage in (0, 1)]
    assert found[0] == found[1]
    assert rank_pool(2).run(losses_in_bf16, 0, {**optimizer, "lr": 1e-12})[0] != found[0], "nothing is learnt"

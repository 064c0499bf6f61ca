"""Every memory under every ZeRO stage on two ranks, where books end on one rank only, trains as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from dist_mem.runtime.distributed import World
from tests.support.contract_cases import CASES, SEG_LEN, carrying, in_turn
from tests.support.ranks import RankPool
from tests.support.tiny import full_parameters, run_steps, tiny_config, tiny_job

pytestmark = pytest.mark.ranks

STEPS = 6  # memories fill in two segments; documents last three on average
TRAIN = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "max_grad_norm": 0.5}
ADAM = {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.1}


def trained(
    world: World, case: str, stage: int, window: int = 1
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, auxiliary loss) of every step, and the parameters after them; `window`: segments of an update."""
    segments = {"segments_per_update": window, "bptt_segments": window}
    config = tiny_config({"train": TRAIN | segments, "optimizer": ADAM})
    config.memory = CASES[case]
    job = tiny_job(config, world, stage=stage)
    outcomes = run_steps(job, first=0, last=STEPS)
    return [(outcome.totals.nll, outcome.totals.aux) for outcome in outcomes], full_parameters(job)


@pytest.fixture(scope="module")
def on_one_rank(rank_pool: Callable[[int], RankPool]) -> Callable[[str], Any]:
    return cache(lambda case, window=1: rank_pool(1).run(trained, case, 0, window)[0])


@pytest.mark.parametrize(("case", "stage"), in_turn(CASES, [0, 1, 2, 3]))
def test_two_ranks_of_every_stage_train_as_one(
    rank_pool: Callable[[int], RankPool], on_one_rank: Callable[[str], Any], case: str, stage: int
) -> None:
    """A parameter that nothing uses in a step is left as a step with gradient 0 leaves it: Adam would show it."""
    assert_equal(rank_pool(2).run(trained, case, stage), on_one_rank(case))


@pytest.mark.parametrize(("case", "stage"), list(product(carrying(), [0, 1, 2, 3])))
def test_two_ranks_train_as_one_through_windows_of_four_segments(
    rank_pool: Callable[[int], RankPool], on_one_rank: Callable[..., Any], case: str, stage: int
) -> None:
    assert_equal(rank_pool(2).run(trained, case, stage, 4), on_one_rank(case, 4))


def assert_equal(of_ranks: list[Any], alone: Any) -> None:
    losses, parameters = alone
    for rank_losses, rank_parameters in of_ranks:
        torch.testing.assert_close(torch.tensor(rank_losses), torch.tensor(losses), rtol=1e-5, atol=1e-5)
        assert rank_parameters.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(rank_parameters[name], value, rtol=0, atol=1e-4, msg=name)

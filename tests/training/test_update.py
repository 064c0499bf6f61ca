"""One update is that of plain autograd, whatever the ZeRO stage, the accumulation, the segments and the ranks."""

from typing import Any

import pytest
import torch

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.memory import memory_class
from tests.support.plain_updates import assert_plain_update
from tests.support.ranks import Pools
from tests.support.tiny import ragged_segments

STAGES = (0, 1, 2, 3)
XL = {"kind": "transformer_xl", "mem_len": 12}
# Its auxiliary loss is a mean over the real queries of each lane.
INFINITE = {"kind": "infinite", **memory_class("infinite").small_options(8), "over": {**XL, "mem_len": 8}}
COMPRESSIVE = {"kind": "compressive", "mem_len": 8, "cmem_len": 8, "compression_rate": 2, "loss_weight": 0.5}


@pytest.mark.parametrize(
    ("world_size", "train"),
    [
        *((1, {"micro_batch_size": size}) for size in (8, 4, 2)),
        *((2, {"micro_batch_size": size}) for size in (4, 2, 1)),
        (2, {"micro_batch_size": 2, "segments_per_update": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", STAGES)
def test_sgd_step_equals_plain_autograd(rank_pool: Pools, stage: int, world_size: int, train: dict[str, Any]) -> None:
    assert_plain_update(rank_pool(world_size), stage, INFINITE, train)


def sparse_segments(config: Any, *, step: int) -> list[Batch]:
    """Of three segments the first is scored nowhere, the second in the last two lanes alone, the third everywhere."""
    first, second, third = ragged_segments(config, step=step)
    nowhere = torch.full_like(first.targets, IGNORE)
    is_scored = torch.arange(config.train.global_batch_size)[:, None] >= config.train.global_batch_size - 2
    only_last = torch.where(is_scored, second.targets, IGNORE)
    return [first._replace(targets=nowhere), second._replace(targets=only_last), third]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("memory", "backwards"),
    [
        (XL, 3),  # of 6: the second group of segment two, and segment three
        (COMPRESSIVE, 6),  # the compression learns from all segments
    ],
    ids=["transformer_xl", "compressive"],
)
def test_segments_without_targets_cost_no_backward_and_change_nothing(
    rank_pool: Pools, stage: int, memory: dict[str, Any], backwards: int
) -> None:
    """As in the sorting task. The targets of the second segment are on one rank only; the other one goes with it."""
    train = {"micro_batch_size": 2, "segments_per_update": 3}  # two ranks: 2 lane groups of 2 lanes each
    assert_plain_update(rank_pool(2), stage, memory, train, segments=sparse_segments, backwards=backwards)

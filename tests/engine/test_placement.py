"""Initial weights: the same bits wherever they are placed, and never all of them whole on a rank of stage 3."""

from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.engine import placement
from dist_mem.engine.placement import place_parts
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.distributed import World
from tests.support.contract_cases import CASES, SEG_LEN, case_params
from tests.support.ranks import Pools
from tests.support.tiny import VOCAB, full_parameters, tiny_config, tiny_job, zero_block


def config_of(case: str, precision: str = "fp32", model: dict[str, Any] | None = None) -> Any:
    train = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "precision": precision}
    config = tiny_config({"train": train, "model": model or {}})
    return change_config(config, {"memory": CASES[case]})


def whole_weights(case: str, precision: str) -> dict[str, Tensor]:
    """The weights of a model that is built whole on the CPU."""
    config = config_of(case, precision)
    torch.manual_seed(config.train.seed)
    model = MemoryLM(model_spec(config, VOCAB))
    return {name: value.detach().to(DTYPES[precision]) for name, value in model.named_parameters()}


def placed_weights(world: World, case: str, precision: str, stage: int) -> dict[str, Tensor]:
    return full_parameters(tiny_job(config_of(case, precision), world, stage=stage))


@pytest.mark.parametrize("case", case_params())
def test_initial_weights_are_the_same_bits_at_every_stage_and_number_of_ranks(rank_pool: Pools, case: str) -> None:
    for precision, stage, world_size in (("fp32", 3, 2), ("bf16", 3, 2), ("bf16", 2, 2), ("bf16", 3, 1)):
        expected = whole_weights(case, precision)
        for weights in rank_pool(world_size).run(placed_weights, case, precision, stage):
            assert weights.keys() == expected.keys()
            for name, value in weights.items():
                assert torch.equal(value, expected[name]), (name, precision, stage, world_size)


def whole_while_built(world: World, case: str, precision: str) -> tuple[list[int], list[tuple[int, int]], int]:
    """How many values were whole at each partition; of each parameter those held at the end, and all; of all parts."""
    deepspeed.init_distributed("gloo")
    config = config_of(case, precision, {"num_layers": 4})
    parameters: dict[nn.Parameter, None] = {}
    whole: list[int] = []
    partition = placement.partition

    def noted(part: Any, partitioner: Any) -> None:
        parameters.update(dict.fromkeys(part))
        whole.append(sum(parameter.numel() for parameter in parameters))
        partition(part, partitioner)
        assert {parameter.numel() for parameter in parameters} == {0}

    with mock.patch.object(placement, "partition", noted):
        place = place_parts(config.train, zero_block(3), world.device, world_size=world.size)
        model: Any = MemoryLM(model_spec(config, VOCAB), place)
    held = [(parameter.ds_tensor.numel(), parameter.ds_numel) for parameter in model.parameters()]
    dtypes = {parameter.ds_tensor.dtype for parameter in model.parameters()}
    assert dtypes == {DTYPES[precision]}
    return whole, held, sum(parameter.ds_numel for parameter in model.parameters())


def test_no_rank_of_stage_3_ever_holds_more_than_one_part_whole(rank_pool: Pools) -> None:
    for whole, held, total in rank_pool(2).run(whole_while_built, "transformer_xl", "bf16"):
        assert max(whole) < total / 2, "four blocks, embedding and softmax"
        assert all(part == -(-numel // 2) for part, numel in held)


def with_own_layout(world: World) -> tuple[bool, bool]:
    """Whether weights are left whole for DeepSpeed: with its own layout of them, and at stage 2."""
    deepspeed.init_distributed("gloo")
    block = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    places = [place_parts(tiny_config().train, each, world.device, world_size=1) for each in (block, zero_block(2))]
    return tuple(type(place) is placement.Placement for place in places)  # type: ignore[return-value]


def test_weights_that_deepspeed_offloads_are_left_to_it(rank_pool: Pools) -> None:
    assert rank_pool(1).run(with_own_layout) == [(True, False)]

"""Compiled blocks under every ZeRO stage on two ranks: they train as blocks that are not compiled."""

from typing import Any

import pytest
import torch

from dist_mem.block import any_compiled
from dist_mem.config import change_config
from dist_mem.engine.compiling import compile_blocks
from dist_mem.nn import compilation
from dist_mem.runtime.distributed import World
from dist_mem.runtime.signals import StopSignal
from dist_mem.training.compiling import compile_model
from tests.support.compiled_blocks import TRACED, num_graphs, without_inductor
from tests.support.contract_cases import CASES
from tests.support.ranks import Pools
from tests.support.tiny import ADAM, TRAIN, full_parameters, run_steps, tiny_config, tiny_job

pytestmark = TRACED


def trained(world: World, case: str, stage: int, train: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(loss, auxiliary loss, gradient norm) of every step, and the parameters after them."""
    config = tiny_config({"train": {**TRAIN, **train}, "optimizer": ADAM, "model": {"dropout": 0.2}})
    config = change_config(config, {"memory": CASES[case]})
    with without_inductor():
        job = tiny_job(config, world, stage=stage)
        if config.train.compile:
            torch.manual_seed(1)
            before = torch.get_rng_state()
            compile_blocks(job.engine, config.train)
            assert torch.equal(torch.get_rng_state(), before)
            compiled_ahead = num_graphs()
            assert compiled_ahead > 0
        torch.manual_seed(2)
        losses = []
        for step in range(4):
            (outcome,) = run_steps(job, first=step, last=step + 1)
            losses.append((outcome.totals.nll, outcome.totals.aux, job.engine.gradient_norm()))
        assert not config.train.compile or num_graphs() == compiled_ahead  # forward and backward were compiled before
        return losses, full_parameters(job)


MEMORIES = ["transformer_xl", "lamemo", "compressive", "infinite over transformer_xl"]
SETTINGS: list[dict[str, Any]] = [{}, {"activation_checkpointing": "attention"}, {"precision": "bf16"}]
BF16 = SETTINGS.index({"precision": "bf16"})  # not at stage 0, where DeepSpeed accumulates gradients in bf16
# Each memory meets each stage, and each setting each memory and stage; the remaining product is nightly.
WINDOW = {"segments_per_update": 4, "bptt_segments": 4}
PRODUCT = [
    pytest.param(
        case,
        train,
        stage,
        id=f"{case}, {train}, stage {stage}",
        marks=() if setting == (number + stage) % (len(SETTINGS) if stage else BF16) else pytest.mark.nightly,
    )
    for number, case in enumerate(MEMORIES)
    for setting, train in enumerate(SETTINGS)
    for stage in range(4)
    if stage or setting != BF16
] + [
    pytest.param("infini", {**WINDOW, "activation_checkpointing": kept}, stage, id=f"a window, {kept}, stage {stage}")
    for kept, stage in (("none", 1), ("segments", 0), ("segments", 3))
]


@pytest.mark.parametrize(("case", "train", "stage"), PRODUCT)
def test_compiled_blocks_train_as_others(rank_pool: Pools, case: str, train: dict[str, Any], stage: int) -> None:
    """Dropout included. Gradients of parameters that blocks share are summed in another order."""
    plain = rank_pool(2).run(trained, case, stage, train)
    compiled = rank_pool(2).run(trained, case, stage, {**train, "compile": True})
    tolerance = 2e-2 if train.get("precision") == "bf16" else 1e-5
    for (losses, parameters), (other_losses, other_parameters) in zip(plain, compiled, strict=True):
        assert losses[0][:2] == other_losses[0][:2]  # the first forward: equal bits
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=tolerance, atol=tolerance)
        for name, value in parameters.items():
            torch.testing.assert_close(other_parameters[name], value, rtol=0, atol=5e-3 if tolerance > 1e-3 else 1e-4)


def left_as_written(world: World, refusing: int, is_wanted: bool | None) -> tuple[list[str], bool, int]:
    """Messages of a start on which the compiler of one rank refuses, whether blocks stay compiled, and steps after."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "no space for code")

    config = tiny_config({"train": {**TRAIN, "compile": is_wanted}})
    # Compiled from the start, as on a GPU. At stage 3 each forward gathers parameters from all ranks.
    job = tiny_job(change_config(config, {"train.compile": True}), world, stage=3)
    with without_inductor(), pytest.MonkeyPatch.context() as patch:
        if world.rank == refusing:
            patch.setattr(compilation, "_inductor", refuse)
        messages = compile_model(config.train, job.engine, StopSignal([]))
    return messages, any_compiled(job.engine.module), len(run_steps(job, first=0, last=2))


@pytest.mark.parametrize("refusing", [0, 1])
def test_blocks_that_one_compiler_refuses_run_as_written_on_every_rank(rank_pool: Pools, refusing: int) -> None:
    ended = rank_pool(2).run(left_as_written, refusing, None)
    assert ended[0] == ended[1]
    (message,), *rest = ended[0]
    assert rest == [False, 2]
    assert message.startswith("the blocks run without torch.compile: train.compile: ") and "no space" in message
    with pytest.raises(Exception, match="no space for code"):
        rank_pool(2).run(left_as_written, refusing, True)

"""How often one update makes the host wait for the device, copies Python values to it, and runs a collective."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_mem.config import change_config
from dist_mem.data.batch import Batch
from dist_mem.engine.engine import Engine
from dist_mem.engine.gradient_norms import GradientNorms
from dist_mem.engine.zero_state import base_optimizer
from dist_mem.runtime.distributed import World, sum_over_ranks
from dist_mem.training import step
from dist_mem.training.step import train_step
from tests.support.contract_cases import CASES, SEG_LEN, case_params
from tests.support.ranks import Pools
from tests.support.tiny import TinyJob, run_steps, tiny_config, tiny_job, update_of_rank

WAITS, FROM_HOST, COLLECTIVES = "waits", "tensors from Python values", "collectives"


class _Dispatched(TorchDispatchMode):
    """Counts reads of single values, and collectives."""

    def __init__(self, counts: Counter[str], on_host: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts, self.on_host = counts, {id(tensor): tensor for tensor in on_host}

    def is_on_host(self, *values: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(id(tensor) in self.on_host for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on_host(args, kwargs):
            self.on_host |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        elif func.namespace == "c10d":
            self.counts[COLLECTIVES] += 1
            self.counts[f"{COLLECTIVES}: {func._schema.name.removeprefix('c10d::')}"] += 1
        elif func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero"):
            self.counts[WAITS] += 1
        return result


class _Called(TorchFunctionMode):
    """Counts copies of tensors to Python, and of Python's values to tensors."""

    def __init__(self, counts: Counter[str], dispatched: _Dispatched) -> None:
        super().__init__()
        self.counts, self.dispatched = counts, dispatched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu) and not self.dispatched.is_on_host(args):
            self.counts[WAITS] += 1
        if func is torch.tensor:
            self.counts[FROM_HOST] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> Iterator[Counter[str]]:
    """Count in the block."""
    from deepspeed.accelerator import get_accelerator

    counts: Counter[str] = Counter()
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    on_host = [part for batch in batches for part in batch if part is not None]

    dispatched = _Dispatched(counts, [*on_host, *steps])

    def copied(batch: Batch, device: torch.device) -> Batch:
        on_host = dict(dispatched.on_host)
        copies = Batch._make(None if part is None else part.clone() for part in batch)
        dispatched.on_host = on_host  # the copies are not
        return copies

    def synchronize(*arguments: Any) -> None:
        counts[WAITS] += 1

    with (
        mock.patch.object(Batch, "to", copied),
        mock.patch.object(type(get_accelerator()), "synchronize", synchronize),
        _Called(counts, dispatched),
        dispatched,
    ):
        yield counts


TRAIN = {
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "segments_per_update": 2,
    "seg_len": SEG_LEN,
    "max_grad_norm": 1.0,
}
NUM_BATCHES = 4  # of two ranks, each with two lane groups
# Of these, one wait and one tensor are ours: the sums of all ranks. DeepSpeed reads its gradient norm to decide whether
# to skip the update, once more to clip, and in bf16 looks for overflows. At stages 1 and 2 fused_checks.py
# computes the norm, without DeepSpeed's tensor of -1.
EXPECTED = {0: (2, 3), 1: (3, 1), 2: (3, 1), 3: (2, 2)}  # by stage: waits, tensors from Python values
REDUCTIONS = {0: 1, 1: 1, 2: NUM_BATCHES, 3: NUM_BATCHES}  # of gradients; the model is one bucket
WEIGHTS = {0: 0, 1: 1, 2: 1, 3: NUM_BATCHES}  # gathers; at stage 3 in every forward, as all stays until the backward


def trained_job(world: World, case: str, stage: int, precision: str) -> TinyJob:
    config = tiny_config({"train": {**TRAIN, "precision": precision}, "optimizer": {"kind": "adamw", "lr": 1e-3}})
    config = change_config(config, {"memory": CASES[case]})
    job = tiny_job(config, world, stage=stage)
    run_steps(job, first=0, last=3)  # after two updates, stage 3 knows the order of the weights and gathers ahead
    return job


def counts_of_update(world: World, case: str, stage: int, precision: str = "fp32") -> dict[str, int]:
    job = trained_job(world, case, stage, precision)
    update = update_of_rank(job.config, world, step=3)
    scored = [int(count) for count in sum_over_ranks(update.scored, world.device)]
    with counted(update.batches, base_optimizer(job.engine._engine)) as counts:
        train_step(job.context, job.state, update, scored, is_logged=False)
    return dict(counts)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_waits_once_for_us_and_all_ranks_agree_in_one_all_reduce(rank_pool: Pools, stage: int) -> None:
    for counts in rank_pool(2).run(counts_of_update, "transformer_xl", stage):
        assert (counts[WAITS], counts[FROM_HOST]) == EXPECTED[stage]
        ours, norm = 1, 1
        assert counts[COLLECTIVES] == REDUCTIONS[stage] + WEIGHTS[stage] + ours + norm


@pytest.mark.parametrize("case", case_params())
def test_no_memory_waits_or_copies_python_values(rank_pool: Pools, case: str) -> None:
    (counts,) = rank_pool(1).run(counts_of_update, case, 2)
    assert (counts[WAITS], counts[FROM_HOST]) == EXPECTED[2]


def order_of_update(world: World) -> list[str]:
    """The order of backwards and of the two ends of the agreement."""
    job = trained_job(world, "transformer_xl", 2, "fp32")
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            order.append(name)
            return function(*arguments, **options)

        return call

    with (
        mock.patch.object(step, "begin", noted("begin", step.begin)),
        mock.patch.object(step, "finish", noted("finish", step.finish)),
        mock.patch.object(Engine, "backward", noted("backward", Engine.backward)),
    ):
        run_steps(job, first=3, last=4)
    return order


def test_ranks_agree_during_the_last_backward(rank_pool: Pools) -> None:
    expected = ["backward"] * (NUM_BATCHES - 1) + ["begin", "backward", "finish"]
    assert rank_pool(2).run(order_of_update) == [expected] * 2


def has_separate_norms(world: World, is_logged: bool) -> tuple[bool, bool]:
    """Whether a gradient is measured in a step, and whether the engine knows the norms then."""
    job = trained_job(world, "compressive", 2, "fp32")
    update = update_of_rank(job.config, world, step=3)
    with mock.patch.object(GradientNorms, "_note", autospec=True, side_effect=GradientNorms._note) as note:
        train_step(job.context, job.state, update, update.scored, is_logged=is_logged)
    return note.called, job.engine.gradient_norms() is not None


def test_separate_gradient_norms_are_measured_in_logged_steps_only(rank_pool: Pools) -> None:
    for is_logged in (True, False):
        assert rank_pool(1).run(has_separate_norms, is_logged) == [(is_logged, is_logged)]

"""What is done about a divergence, by all ranks alike: one update under a real engine, at every ZeRO stage.

Whole runs that diverge are in test_divergence_runs.py. Faults are put in by hooks on one rank, for one step.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_mem.config import DivergenceConfig
from dist_mem.memory.base import map_state
from dist_mem.runtime.distributed import World
from dist_mem.training.divergence import ROLLBACK, SKIP, DivergedError, Divergence
from dist_mem.training.step import Outcome
from tests.support.jobs import difference
from tests.support.ranks import Pools
from tests.support.tiny import full_parameters, memory_of, run_steps, tiny_config, tiny_job

ADAM = {"optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}, "train": {"micro_batch_size": 2}}
STAGES = [0, 1, 2, 3]
FAULTS = {
    "loss": "not finite: the loss of rank [1]",
    "memory": "memory of rank [1]",
    "gradient": "not finite: the gradient",
    "spike": "the loss is a spike",
}


@contextmanager
def fault_on_rank_1(job: Any, what: str) -> Iterator[None]:
    """A loss, a gradient or all of a memory that is not finite, or a loss that is far too high; on rank 1 alone."""
    module = job.engine.module
    hooks = []
    if job.world.rank == 1 and what in ("loss", "spike"):
        factor = {"loss": torch.nan, "spike": 50.0}[what]
        hooks.append(module.head.register_forward_hook(lambda *call: call[-1]._replace(nll=call[-1].nll * factor)))
    if job.world.rank == 1 and what == "gradient":
        hooks.append(module.final_norm.weight.register_hook(lambda gradient: gradient * torch.nan))
    if job.world.rank == 1 and what == "memory":
        job.states = [map_state(lambda part: part * torch.nan if part.is_floating_point() else part + 12, state)
                      for state in job.states]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in tensors.values())


def job_with_history(world: World, stage: int, action: str, *, precision: str = "fp32") -> Any:
    """Ten steps in, enough for a window of losses."""
    divergence = {"action": action, "spike_z": 10.0, "window": 8, "max_times": 9}
    job = tiny_job(tiny_config(ADAM, {"divergence": divergence, "train": {"precision": precision}}), world, stage=stage)
    run_steps(job, first=0, last=10)
    return job


def step_with_fault(job: Any, what: str) -> Outcome:
    with fault_on_rank_1(job, what):
        (outcome,) = run_steps(job, first=job.step, last=job.step + 1)
    return outcome


class Skipped(NamedTuple):
    decision: Any
    parameters_changed: str | None
    memory_is_finite: bool
    cursors: list[list[int]]


def skip_and_go_on(world: World, stage: int, precision: str) -> tuple[list[Skipped], dict[str, Tensor]]:
    """Every fault in a step of its own, that of the memory after two steps without one; parameters before that."""
    job = job_with_history(world, stage, SKIP, precision=precision)
    skipped = []
    for what in ("loss", "gradient", "spike", "", "", "memory"):
        before = full_parameters(job)
        decision = step_with_fault(job, what).decision
        if what:
            changed = difference(before, full_parameters(job))
            skipped.append(Skipped(decision, changed, is_finite(memory_of(job)), job.cursors.tolist()))
    return skipped, before


def read_and_go_on(world: World, stage: int, precision: str) -> dict[str, Tensor]:
    """The same, but the segments of the three skipped steps are only read."""
    job = job_with_history(world, stage, SKIP, precision=precision)
    job.divergence.first_trained = 13
    run_steps(job, first=10, last=15)
    return full_parameters(job)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_ranks_skip_the_update_and_go_on_as_if_its_segments_had_only_been_read(
    rank_pool: Pools, precision: str, stage: int
) -> None:
    """Bit for bit: nothing of the gradient is left anywhere, no moment has decayed, no memory has a hole."""
    (expected, _) = rank_pool(2).run(read_and_go_on, stage, precision)
    results = rank_pool(2).run(skip_and_go_on, stage, precision)
    for skipped, parameters in results:
        for step, what, found in zip((10, 11, 12, 15), ("loss", "gradient", "spike", "memory"), skipped, strict=True):
            assert found.decision.action == SKIP
            assert f"step {step + 1}: " in found.decision.message and FAULTS[what] in found.decision.message
            assert found.parameters_changed is None
            assert found.memory_is_finite
            assert found.cursors == [[step, step, step]] * 4
        assert difference(parameters, expected) is None
    assert [found.decision for found in results[0][0]] == [found.decision for found in results[1][0]]


def memories_around_a_fault(world: World, what: str) -> list[dict[str, Tensor]]:
    """Memories after the eleventh step: with a fault, without one, and empty ones."""
    ends = []
    for fault in (what, ""):
        job = job_with_history(world, 2, SKIP)
        step_with_fault(job, fault)
        ends.append(memory_of(job))
    job.states = [job.engine.init_state(group) for group in job.lane_ids.split(2)]
    return [*ends, memory_of(job)]


def test_memory_that_is_not_finite_starts_empty_and_every_other_one_has_read_the_segment(rank_pool: Pools) -> None:
    for what in ("loss", "memory"):
        for rank, (faulty, good, empty) in enumerate(rank_pool(2).run(memories_around_a_fault, what)):
            starts_empty = what == "memory" and rank == 1
            assert difference(good, empty) is not None
            if not starts_empty:
                assert difference(faulty, good) is None
                continue
            # Lanes that begin a document, or whose state has no row yet, are not poisoned: compare lane by lane.
            lanes = {
                name: [torch.equal(a, b) for a, b in zip(part, empty[name], strict=True)]
                for name, part in faulty.items()
            }
            assert all(any(equal) for equal in lanes.values())
            assert is_finite(faulty)


def every_fault(world: World, stage: int, action: str) -> list[tuple[Any, str | None, str | None]]:
    """One after the other in the same step: what is decided, which parameter and which memory has changed."""
    job = job_with_history(world, stage, action)
    found = []
    for what in FAULTS:
        parameters, states = full_parameters(job), list(job.states)
        memory = memory_of(job)
        try:
            decision: Any = step_with_fault(job, what).decision
        except DivergedError as error:
            decision = str(error)
        job.step = 10
        if what == "memory":  # it was put there from outside
            job.states = states
        found.append((decision, difference(parameters, full_parameters(job)), difference(memory, memory_of(job))))
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("action", ["stop", ROLLBACK])
def test_nothing_moves_before_a_rollback_or_a_stop(rank_pool: Pools, action: str, stage: int) -> None:
    results = rank_pool(2).run(every_fault, stage, action)
    assert [decision for decision, _, _ in results[0]] == [decision for decision, _, _ in results[1]]
    for found in results:
        for what, (decision, parameters_changed, memory_changed) in zip(FAULTS, found, strict=True):
            message = decision if action == "stop" else decision.message
            assert "step 11: " in message and FAULTS[what] in message and "loss " in message
            assert action == "stop" or decision.action == ROLLBACK
            assert (parameters_changed, memory_changed) == (None, None)


def policy(**options: Any) -> Divergence:
    return Divergence(DivergenceConfig(**{"action": "skip", "spike_z": 6.0, "window": 32, **options}))


def test_a_run_does_not_skip_for_ever() -> None:
    skips = policy(max_times=2)
    assert [skips.decide(step, "a reason", loss=1.0).action for step in (1, 2)] == [SKIP] * 2
    with pytest.raises(DivergedError, match="max_times = 2 is used up"):
        skips.decide(3, "a reason", loss=1.0)


def noisy_losses(seed: int, *, heavy: bool) -> Iterator[float]:
    """A falling curve with normal noise, or with noise that is often far out (Laplace)."""
    draw = random.Random(seed)
    for step in range(2000):
        noise = draw.expovariate(1) * draw.choice((-1, 1)) if heavy else draw.gauss(0, 1)
        yield 3 + 5 * 0.99**step + 0.05 * noise


@pytest.mark.parametrize(
    ("heavy", "spike_z", "alarms"),
    [(False, 6.0, 0), (True, 10.0, 4)],
    ids=["normal: fewer than 1 in 8,000", "heavy: at most 1 in 2,000"],
)
def test_noise_is_rarely_a_spike_and_a_spike_is_found_at_once(heavy: bool, spike_z: float, alarms: int) -> None:
    """A fall never is one, and spikes do not widen what counts as one."""
    found = 0
    for seed in range(4):
        divergence = policy(window=128, spike_z=spike_z)
        for loss in noisy_losses(seed, heavy=heavy):
            found += divergence.judge(loss) is not None
            divergence.remember(loss)
        for _ in range(10):
            assert divergence.judge(3.0 + 0.05 * 2 * spike_z) is not None
            divergence.remember(9.0)
        assert divergence.judge(0.0) is None
    assert found <= alarms


def test_no_loss_is_a_spike_before_the_window_is_full_or_where_none_is_asked_for() -> None:
    young, indifferent = policy(), policy(spike_z=None)
    for loss in [3.0, 3.1] * 15 + [3.0]:
        young.remember(loss)
        indifferent.remember(loss)
    assert young.judge(1e6) is None
    young.remember(3.1)
    assert young.judge(1e6) is not None
    assert indifferent.judge(1e6) is None


def test_constant_losses_make_no_spike_of_a_ripple() -> None:
    divergence = policy()
    for _ in range(32):
        divergence.remember(0.0)
    assert divergence.judge(1e-3) is None
    assert divergence.judge(0.1) is not None

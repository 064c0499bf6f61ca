"""Saved and restored training state is complete: the same stage and world continue bit for bit, others exactly."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.runtime.distributed import World
from tests.support.engine_saves import (
    AFTER,
    BEFORE,
    FROZEN,
    engine_job,
    gathered,
    load_as_deepspeed,
    next_losses,
    restore_and_train,
    restore_engine,
    save_and_train,
    save_as_deepspeed,
    save_engine,
)
from tests.support.jobs import checkpoint_content, difference
from tests.support.messages import said
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools, RankPool
from tests.support.tiny import TinyJob, full_parameters, run_steps, tiny_config, tiny_job, zero_block

OFFLOAD = {"device": "cpu"}
DROPOUT = {"model": {"dropout": 0.1}}
SGD = {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.0}}
# Without decay, which would make numbers of what happens to stand in the padding.
SLOW = [{"param_regex": "embedding", "lr": 0.02}]
MOMENTUM = {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "groups": SLOW}}
MUON = {"optimizer": {"kind": "muon", "lr": 2e-3, "muon": {"lr": 0.01}}}


def precision(name: str) -> dict[str, Any]:
    return {"train": {"precision": name}}


class Moment:
    """The state of a run besides its engine: step, memories, dropout."""

    def __init__(self, job: Any) -> None:
        self.step, self.states, self.random = job.step, job.states, torch.get_rng_state()

    def return_to(self, job: Any) -> None:
        job.step, job.states = self.step, self.states
        torch.set_rng_state(self.random)


def futures(world: World, directory: Path, stage: int, overrides: list[Any], zero: dict[str, Any]) -> dict[str, Any]:
    """Return the losses after a save: of the run, of others that restore it, and of the run after a rollback."""
    job, restored, loaded = (engine_job(world, stage, *overrides, seed, **zero) for seed in seeds(1, 77, 78))
    torch.manual_seed(5 + world.rank)
    next_losses(job, BEFORE)
    save_engine(job, directory)
    save_as_deepspeed(job, directory / "trained")
    moment, found = Moment(job), {}

    def go_on(again: Any) -> tuple[list[float], dict[str, Tensor]]:
        moment.return_to(again)
        return next_losses(again, AFTER), full_parameters(again)

    found["straight"] = go_on(job)
    restore_engine(restored, directory)
    save_as_deepspeed(restored, directory / "restored")
    found["restored"] = go_on(restored)
    load_as_deepspeed(loaded, directory / "trained")
    found["loaded by DeepSpeed"] = go_on(loaded)
    restore_engine(job, directory)
    found["rolled back"] = go_on(job)
    return found


def seeds(*numbers: int) -> list[dict[str, Any]]:
    return [{"train": {"seed": number}} for number in numbers]


def without_frozen_padding(content: dict[str, Any]) -> dict[str, Any]:
    """At stage 3 the last rank's part of a frozen parameter is filled up with memory as DeepSpeed found it."""
    states = content.get("engine/zero_pp_rank_1_mp_rank_00_model_states.pt", {})
    for name, fragment in (states.get("frozen_param_fragments") or {}).items():
        fragment[states["frozen_param_shapes"][name].numel() - len(fragment) :] = 0
    return content


def assert_goes_on_bitwise(
    pool: RankPool, directory: Path, stage: int, overrides: list[Any], zero: dict[str, Any]
) -> None:
    for found in pool.run(futures, directory, stage, overrides, zero):
        assert len(set(found["straight"][0])) == AFTER
        assert {name: difference(found["straight"], future) for name, future in found.items()} == dict.fromkeys(found)
    # DeepSpeed's own files are everything that DeepSpeed thinks training depends on.
    own = [without_frozen_padding(checkpoint_content(directory / name)) for name in ("trained", "restored")]
    assert own[0], "DeepSpeed has written nothing"
    if stage == 0 and "fp32_groups" in (without_zero := own[1]["engine/mp_rank_00_model_states.pt"]["optimizer"]):
        without_zero["cur_iter"] = BEFORE  # of a loss scale that bf16 does not have
    assert difference(*own) is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_same_world_goes_on_bitwise(tmp_path: Path, rank_pool: Pools, stage: int, kind: str) -> None:
    """With dropout; as DeepSpeed's own files go on, and a rollback; what it would save is the same to the last bit."""
    assert_goes_on_bitwise(rank_pool(2), tmp_path, stage, [DROPOUT, precision(kind)], {})


@pytest.mark.parametrize(
    ("stage", "overrides", "zero"),
    [
        pytest.param(3, [precision("bf16")], {"stage3_param_persistence_threshold": 100}, id="some kept gathered"),
        pytest.param(3, [precision("bf16")], {"offload_optimizer": OFFLOAD}, id="optimizer on the host"),
        pytest.param(3, [], {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}, id="parameters on the host"),
        pytest.param(2, [precision("bf16")], {"offload_optimizer": OFFLOAD}, id="optimizer on the host, stage 2"),
        pytest.param(1, [], {"parameter_alignment": True}, id="padding between parameters"),
        pytest.param(2, [precision("bf16")], {"round_robin_gradients": True}, id="parameters in another order"),
        pytest.param(0, [MOMENTUM, precision("bf16")], {}, id="momentum, stage 0"),
        pytest.param(1, [SGD], {}, id="no state at all"),
        pytest.param(3, [MOMENTUM], {}, id="momentum, stage 3"),
        pytest.param(2, [{"optimizer": {"kind": "adam", "groups": FROZEN}}], {}, id="some frozen, stage 2"),
        pytest.param(0, [MUON], {}, id="muon, stage 0"),
        pytest.param(1, [MUON, precision("bf16")], {}, id="muon, stage 1, bf16"),
        pytest.param(2, [MUON, precision("bf16")], {"offload_optimizer": OFFLOAD}, id="muon on the host, stage 2"),
        pytest.param(3, [MUON, precision("bf16")], {}, id="muon, stage 3, bf16"),
        pytest.param(3, [precision("bf16"), {"optimizer": {"groups": FROZEN}}], {}, id="some frozen, stage 3"),
    ],
)
def test_every_way_of_keeping_state_goes_on_bitwise(
    tmp_path: Path, rank_pool: Pools, stage: int, overrides: list[Any], zero: dict[str, Any]
) -> None:
    assert_goes_on_bitwise(rank_pool(2), tmp_path, stage, overrides, zero)


def untrained_then_rolled_back(world: World, directory: Path, stage: int) -> tuple[list[float], list[float]]:
    job = engine_job(world, stage)
    save_engine(job, directory)
    moment = Moment(job)
    straight = next_losses(job, BEFORE)
    restore_engine(job, directory)
    moment.return_to(job)
    return straight, next_losses(job, BEFORE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_that_did_not_exist_yet_does_not_exist_again(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    for straight, again in rank_pool(2).run(untrained_then_rolled_back, tmp_path, stage):
        assert straight == again
    assert EngineReader(tmp_path).read("exp_avg", "embedding.bins.0.weight", 0, 1) is None


def counters_of(job: Any) -> dict[str, Any]:
    return {**vars(job.engine._engine.optimizer.loss_scaler), **job.engine.metadata()["counters"]}


def fp16_futures(world: World, directory: Path, stage: int) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Losses and scales of the run and of another engine that read its save; and the scale's figures at the save."""
    # DeepSpeed claims fp16 only for CPUs with fast fp16 products; the slow ones do for a few steps.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"initial_scale_power": 24, "hysteresis": 2, "loss_scale_window": 2}
    job, other = (
        tiny_job(tiny_config(precision("fp16")), world, stage=stage, block={**zero_block(stage), "fp16": fp16})
        for _ in range(2)
    )
    next_figures(job, 4)
    save_engine(job, directory)
    moment, figures = Moment(job), counters_of(job)
    straight = next_figures(job, 4)
    restore_engine(other, directory)
    assert counters_of(other) == figures
    moment.return_to(other)
    return straight, next_figures(other, 4), figures


def next_figures(job: TinyJob, num_updates: int) -> list[Any]:
    """Loss, number of overflows, and all that DeepSpeed knows of the loss scale after each update."""
    found = []
    for _ in range(num_updates):
        (outcome,) = run_steps(job, first=job.step, last=job.step + 1)
        found.append((outcome.totals.nll, outcome.overflows, dict(vars(job.engine._engine.optimizer.loss_scaler))))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_the_loss_scale_goes_on(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    for straight, resumed, figures in rank_pool(2).run(fp16_futures, tmp_path, stage):
        assert straight == resumed
        assert figures["skipped_steps"] > 0, "nothing overflowed: the test proves little"
        assert len({after["cur_scale"] for _, _, after in straight} | {figures["cur_scale"]}) > 1


def with_buffers(world: World, directory: Path, stage: int) -> list[tuple[Tensor, Tensor]]:
    """A job of which the model has constants of its own, and one that read it."""
    found = []
    for value in (3.0, 0.0):
        job = engine_job(world, stage)
        job.engine.module.register_buffer("scale", torch.full((3, 5), value))
        job.engine.module.register_buffer("unused", torch.empty(0))
        job.engine.module.register_buffer("recomputed", torch.full((2,), value), persistent=False)
        if value:
            save_engine(job, directory)
        else:
            restore_engine(job, directory)
        found.append((job.engine.module.scale, job.engine.module.recomputed))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_constants_of_the_model_come_back(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    for saved, restored in rank_pool(2).run(with_buffers, tmp_path, stage):
        assert torch.equal(saved[0], restored[0])
        assert not torch.equal(saved[1], restored[1]), "it is made anew with the model"
    assert torch.equal(EngineReader(tmp_path).weights()["scale"], torch.full((3, 5), 3.0))


def start(world: World, stage: int, overrides: list[Any], zero: dict[str, Any]) -> None:
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: False  # true of some CPUs
    engine_job(world, stage, *overrides, **zero)


@pytest.mark.parametrize(
    ("named", "stage", "overrides", "zero"),
    [
        ("offload_optimizer.device=nvme", 3, [], {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
        ("zero_quantized_nontrainable_weights", 3, [], {"zero_quantized_nontrainable_weights": True}),
        ("train.precision", 1, [precision("fp16")], {}),
    ],
)
def test_state_that_could_not_be_saved_and_fp16_on_a_device_without_it_are_refused_at_the_start(
    rank_pool: Pools, named: str, stage: int, overrides: list[Any], zero: dict[str, Any]
) -> None:
    (text,) = rank_pool(1).run(error_of, start, stage, overrides, zero)
    said(text, "ValueError", named)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Callable[[int, int], Any]:
    """(world size, stage) -> directory, values and losses of a run of that kind; each made once."""

    @cache
    def get(world_size: int, stage: int) -> Any:
        directory = tmp_path_factory.mktemp(f"world{world_size}-stage{stage}-")
        return directory, *rank_pool(world_size).run(save_and_train, directory, stage, [])[0]

    return get


def from_all(*worlds: int) -> list[tuple[int, int]]:
    return [(world, stage) for world in worlds for stage in range(4)]


def assert_equal_after_moves(
    pools: Pools, source: Callable[[int, int], Any], origins: list[tuple[int, int]], world_size: int, stage: int
) -> None:
    """Weights, moments and steps of each parameter by name; rates and decay stay those of the configuration."""
    sources = [source(*origin) for origin in origins]
    directories = [directory for directory, _, _ in sources]
    for (_, values, losses), (found, found_losses) in zip(
        sources, pools(world_size).run(restore_and_train, directories, stage, [])[0], strict=True
    ):
        assert {name.partition("/")[0] for name in values} == {"master", "exp_avg", "exp_avg_sq", "step"}
        assert difference(dict(sorted(values.items())), dict(sorted(found.items()))) is None
        assert found_losses == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_reads_every_stage_exactly(rank_pool: Pools, source: Callable[[int, int], Any], stage: int) -> None:
    assert_equal_after_moves(rank_pool, source, from_all(2), 2, stage)


@pytest.mark.parametrize(
    ("origins", "world_size", "stage"),
    [
        pytest.param([(2, 3), (2, 1)], 1, 0, marks=pytest.mark.core),
        ([(2, 0), (2, 2)], 1, 3),
        ([(1, 3), (1, 0)], 2, 2),
        ([(1, 2), (1, 1)], 2, 3),
        pytest.param(from_all(1, 2, 4), 3, 3, marks=pytest.mark.nightly),
        pytest.param(from_all(1, 2, 3), 4, 2, marks=pytest.mark.nightly),
        pytest.param(from_all(3, 4), 2, 1, marks=pytest.mark.nightly),
        pytest.param(from_all(3, 4), 1, 3, marks=pytest.mark.nightly),
        pytest.param(from_all(2, 4), 3, 0, marks=pytest.mark.nightly),
    ],
)
def test_every_number_of_ranks_reads_every_other_exactly(
    rank_pool: Pools, source: Callable[[int, int], Any], origins: list[tuple[int, int]], world_size: int, stage: int
) -> None:
    assert_equal_after_moves(rank_pool, source, origins, world_size, stage)


def freed(world: World, directory: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model of which a part was frozen, read by one that trains all, and by the frozen one again."""
    frozen = engine_job(world, stage, precision("bf16"), {"optimizer": {"groups": FROZEN}})
    save_engine(frozen, directory / "frozen")
    free = engine_job(world, stage, precision("bf16"), {"train": {"seed": 77}})
    restore_engine(free, directory / "frozen")
    save_engine(free, directory / "free")
    restore_engine(frozen, directory / "free")
    return full_parameters(free), full_parameters(frozen)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_are_read_as_trained_ones_and_back(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    for free, frozen in rank_pool(2).run(freed, tmp_path, stage):
        assert difference(free, frozen) is None
    saved = EngineReader(tmp_path / "frozen").weights()
    assert difference({name: saved[name] for name in free}, {name: part.float() for name, part in free.items()}) is None


def without_counts(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in sorted(values.items()) if not name.startswith("step/")}


def unfrozen(world: World, directory: Path, stages: list[int]) -> list[Any]:
    """A model of which a part is frozen for some steps, then trained at each stage, and again where it was frozen."""
    part = {"optimizer": {"groups": [{"param_regex": "embedding", "trainable": False}]}}
    whole: dict[str, Any] = {"optimizer": {"groups": []}}
    frozen = engine_job(world, 2, part)
    next_losses(frozen, BEFORE)
    save_engine(frozen, directory / "frozen")
    found = []
    for stage in stages:
        job = engine_job(world, stage, whole, {"train": {"seed": 77}})
        next_losses(job, 1)  # its own moments, as at a rollback
        restore_engine(job, directory / "frozen")
        at_start, names = gathered(job), job.engine.restored_empty
        job.step = BEFORE
        next_losses(job, AFTER)
        save_engine(job, directory / str(stage))
        back = engine_job(world, 2, whole)
        restore_engine(back, directory / str(stage))
        moved = difference(*(without_counts(gathered(one)) for one in (job, back)))
        moments = [at_start[name] for name in at_start if name.startswith("exp_avg") and "embedding" in name]
        steps = {float(part) for name, part in gathered(back).items() if name.startswith("step/")}
        found.append((names, [float(moment.abs().max()) for moment in moments], moved, steps))
    return found


def test_unfrozen_parameters_start_with_zero_moments_at_every_stage_and_move_back(
    tmp_path: Path, rank_pool: Pools
) -> None:
    for found in rank_pool(2).run(unfrozen, tmp_path, [0, 1, 2, 3]):
        for names, moments, moved, steps in found:
            assert names and all("embedding" in name for name in names)
            assert set(moments) <= {0.0}
            assert moved is None
            assert steps == {BEFORE + AFTER}


def restored_otherwise(world: World, directory: Path, stage: int, change: Callable[..., Any]) -> None:
    """Restore, where the data that rank 1 reads is changed."""
    job = engine_job(world, stage)
    next_losses(job, 1)
    save_engine(job, directory)
    reader = EngineReader(directory)

    def read(kind: str, name: str, start: int, stop: int) -> Tensor | None:
        found = reader.read(kind, name, start, stop)
        return change(kind, name, found) if world.rank == 1 else found

    job.engine.restore(read, reader.counters)


def counts_after_one_tensor_for_all(world: World, directory: Path, stage: int) -> set[float]:
    job = engine_job(world, stage)
    next_losses(job, BEFORE)
    save_engine(job, directory)
    reader, count = EngineReader(directory), torch.tensor(float(BEFORE))
    job.engine.restore(lambda kind, *place: count if kind == "step" else reader.read(kind, *place), reader.counters)
    next_losses(job, 1)
    return {float(part.parts["step"]) for part in job.engine.owned_slices()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_everything_that_is_stepped_by_itself_counts_by_itself(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    assert rank_pool(2).run(counts_after_one_tensor_for_all, tmp_path, stage) == [{BEFORE + 1.0}] * 2


def without_head(kind: str, name: str, found: Tensor | None) -> Tensor | None:
    return None if name.startswith("blocks.1") else found


def without_some_moments(kind: str, name: str, found: Tensor | None) -> Tensor | None:
    return None if kind == "exp_avg" and name.endswith("weight") else found


@pytest.mark.parametrize(("change", "named"), [(without_head, "blocks.1"), (without_some_moments, "exp_avg")])
def test_what_does_not_fit_is_refused_on_all_ranks(
    tmp_path: Path, rank_pool: Pools, change: Callable[..., Any], named: str
) -> None:
    for text in rank_pool(2).run(error_of, restored_otherwise, tmp_path, 2, change):
        said(text, "UnusableError", named)

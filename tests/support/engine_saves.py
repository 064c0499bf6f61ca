"""Small engines for tests under any ZeRO block: create, save and restore them, and gather their state of all ranks."""

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import Tensor

from dist_mem.checkpoint.engine_files import ENGINE_JSON, EngineReader, engine_index, engine_ranges, engine_tensors
from dist_mem.checkpoint.rank_file import rank_file, tensors_of_file
from dist_mem.runtime.distributed import World, gather_objects
from tests.support.tiny import run_steps, tiny_config, tiny_job

BEFORE, AFTER = 2, 3  # steps before the save and after it
FROZEN = [{"param_regex": "embedding|bias", "trainable": False}]
GROUPS = [{"param_regex": "embedding", "lr": 1e-3}, {"param_regex": "feed_forward", "lr": 5e-3, "weight_decay": 0.3}]
ADAMW = {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.1, "groups": GROUPS}  # four groups: decay or not, two rates


def engine_job(world: World, stage: int, *overrides: dict[str, Any], **zero: Any) -> Any:
    """Return a `tiny_job` with four parameter groups, small sub-groups, and sizes that two ranks do not divide."""
    config = tiny_config(
        {"model": {"d_inner": 37}, "optimizer": ADAMW, "train": {"micro_batch_size": 8 // world.size // 2 or 1}},
        *overrides,
    )
    cut = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 500}
    return tiny_job(config, world, stage=stage, block={"zero_optimization": {**cut, **zero}})


def next_losses(job: Any, num_steps: int) -> list[float]:
    """Run the next updates; return the mean loss of each."""
    outcomes = run_steps(job, first=job.step, last=job.step + num_steps)
    return [outcome.totals.nll / outcome.totals.num_scored for outcome in outcomes]


def save_engine(job: Any, directory: Path) -> None:
    """Write the engine's files of a checkpoint; every rank calls it."""
    rank, owned = dist.get_rank(), job.engine.owned_slices()
    path = directory / rank_file(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in engine_tensors(owned).items()}
    save_file(tensors_of_file({"engine": tensors}), path)
    metadata = job.engine.metadata()
    index = engine_index(metadata, gather_objects(engine_ranges(owned, metadata["shapes"])))
    if rank == 0:
        (directory / ENGINE_JSON).write_text(json.dumps(index))
    dist.barrier()


def restore_engine(job: Any, directory: Path) -> None:
    """Restore the engine from the files of `save_engine`; every rank calls it."""
    reader = EngineReader(directory)
    job.engine.restore(reader.read, reader.counters)


def gathered(job: Any) -> dict[str, Tensor]:
    """Return the engine's full tensors by KIND/NAME, gathered from all ranks; scalars are returned as they are.

    Every rank calls it, and gets all tensors.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in job.engine.metadata()["shapes"].items()}
    covered = {name: torch.zeros(size) for name, size in sizes.items()}
    whole: dict[str, Tensor] = {}
    for slices in gather_objects([found._replace(parts=clones(found.parts)) for found in job.engine.owned_slices()]):
        for name, start, stop, parts in slices:
            covered[name][start:stop] += 1
            for kind, part in parts.items():
                if part.dim() == 0:
                    assert torch.equal(whole.setdefault(f"{kind}/{name}", part), part)
                    continue
                assert part.shape == (stop - start,), f"{kind} of {name}"
                tensor = whole.setdefault(f"{kind}/{name}", torch.full((sizes[name],), torch.nan, dtype=part.dtype))
                tensor[start:stop] = part
    for name, counts in covered.items():
        assert (counts == 1).all(), f"{name} is owned {counts.min():.0f} to {counts.max():.0f} times"
    return whole


def clones(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into separate memory: pickling a view would include its whole storage."""
    return {kind: part.clone() for kind, part in parts.items()}


def masters(job: Any) -> dict[str, Tensor]:
    """Return the full fp32 parameters, trained and frozen, as DeepSpeed reports them, by each one's first name."""
    optimizer = job.engine._engine.optimizer
    known: dict[int, Tensor] = {}
    if job.engine.stage == 0 and hasattr(optimizer, "fp32_groups"):
        for halves, wholes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            known.update({id(half): whole for half, whole in zip(halves, wholes, strict=True)})
    found = {}
    for name, parameter in job.engine.module.named_parameters():
        whole = known.get(id(parameter))
        if whole is None and parameter.requires_grad and job.engine.stage:
            whole = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=job.engine.stage == 3):
            found[name] = (parameter if whole is None else whole).detach().clone().float()
    return found


DEEPSPEEDS = "engine"  # folder of DeepSpeed's own files


def save_as_deepspeed(job: Any, directory: Path) -> None:
    """Save with DeepSpeed's own checkpointing; every rank calls it."""
    job.engine._engine.save_checkpoint(str(directory), tag=DEEPSPEEDS, save_latest=False)


def load_as_deepspeed(job: Any, directory: Path) -> None:
    """Load with DeepSpeed's own checkpointing, at the same stage and number of ranks."""
    found, _ = job.engine._engine.load_checkpoint(str(directory), tag=DEEPSPEEDS, load_lr_scheduler_states=False)
    assert found is not None


def save_and_train(
    world: World, directory: Path, stage: int, overrides: list[Any]
) -> tuple[dict[str, Tensor], list[float]]:
    """Save after some steps; return the saved tensors and the losses that follow, from empty memories."""
    job = engine_job(world, stage, *overrides)
    empty = job.states
    next_losses(job, BEFORE)
    save_engine(job, directory)
    values = gathered(job)
    job.states = empty
    return values, next_losses(job, AFTER)


def settings(job: Any) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in job.engine._engine.optimizer.param_groups]


def restore_and_train(
    world: World, directories: list[Path], stage: int, overrides: list[Any]
) -> list[tuple[Any, list[float]]]:
    """The same of fresh engines that read it, with another accumulation."""
    found = []
    for directory in directories:
        job = engine_job(world, stage, *overrides, {"train": {"seed": 77, "micro_batch_size": 1}})
        configured = settings(job)
        restore_engine(job, directory)
        assert settings(job) == configured
        assert len(set(configured)) > 1
        values = gathered(job)
        job.step = BEFORE
        found.append((values, next_losses(job, AFTER)))
    return found

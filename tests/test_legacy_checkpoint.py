"""Checkpoints of formats 1 and 2, whose engine files are DeepSpeed's own, still give their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_saves import FROZEN, engine_job, masters, next_losses, save_as_format_2
from jobs import difference
from ranks import RankPool
from torch import Tensor

from dist_mem.checkpoint.legacy import consolidated_state_dict
from dist_mem.distributed import World


def train_and_save(world: World, directory: Path, stage: int, precision: str, groups: list[Any]) -> dict[str, Tensor]:
    job = engine_job(world, stage, {"optimizer": {"groups": groups}, "train": {"precision": precision}})
    next_losses(job, 2)
    save_as_format_2(job, directory)
    return masters(job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "groups"), [("fp32", FROZEN), ("bf16", [])])
def test_consolidated_weights_are_what_the_optimizer_trains(
    tmp_path: Path, rank_pool: Callable[[int], RankPool], stage: int, precision: str, groups: list[Any]
) -> None:
    expected = rank_pool(2).run(train_and_save, tmp_path, stage, precision, groups)[0]
    found = consolidated_state_dict(tmp_path)
    assert difference({name: found[name] for name in expected}, expected) is None
    assert torch.equal(found["head.bins.0.weight"], found["embedding.bins.0.weight"])

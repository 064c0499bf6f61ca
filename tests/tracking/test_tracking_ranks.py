"""Who imports mlflow: rank 0 of a job, and nobody else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.runtime.distributed import World
from tests.support.jobs import build_books, train_here, write_config
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


def imports_mlflow(world: World, config_file: Path) -> bool:
    """Whether training does."""
    if world.rank != 0:
        for name in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
            del sys.modules[name]  # a test module may have asked for it
    assert train_here(world, config_file) == 0
    return "mlflow" in sys.modules


def test_ranks_other_than_0_never_import_mlflow(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    changes = {"tracking": {"mlflow": True, "uri": f"sqlite:///{tmp_path}/mlflow.db"}, "train": {"steps": 2}}
    config_file = write_config(tmp_path / "job.yaml", build_books(tmp_path / "data"), tmp_path / "run", changes)
    assert rank_pool(2).run(imports_mlflow, config_file) == [True, False]

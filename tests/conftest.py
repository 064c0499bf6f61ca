"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import RankPool

torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(2)` gives two ranks that live until the end of the session."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real books (`data/pg19`, ...); tests that need it skip where it is absent."""
    folder = Path(os.environ.get("DIST_MEM_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no real books at {folder / 'data'}; set DIST_MEM_SHARED to a folder that has data/pg19")
    return folder

"""A run that all tests of the Python API share, in a folder as the pages name it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import build_books, train_here, write_config
from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def api_folder(tmp_path_factory: pytest.TempPathFactory, rank_pool: Callable[[int], RankPool]) -> Path:
    """A folder with `runs/demo`, trained for 8 steps by one rank, its `run.yaml`, and a `book.txt`."""
    folder = tmp_path_factory.mktemp("api")
    data = build_books(folder)
    config = write_config(folder / "run.yaml", data, Path("runs/demo"), {"train": {"steps": 8, "micro_batch_size": 8}})
    rank_pool(1).run(train_here, config, [f"run_dir={folder / 'runs' / 'demo'}"])
    text = (folder / "texts" / "test" / "0.txt").read_text(encoding="utf-8")
    (folder / "book.txt").write_text(text, encoding="utf-8")
    return folder

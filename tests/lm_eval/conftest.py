"""A model that tasks ask."""

from pathlib import Path

import pytest

from dist_mem.evaluation.export import run as export
from tests.support.jobs import write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, books: Path) -> Path:
    root = tmp_path_factory.mktemp("model")
    assert export(write_config(root / "run.yaml", books, root / "run"), out=root / "model") == 0
    return root / "model"

"""A server of a small split, and the data of a job that reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_mem.config import DataConfig
from tests.support.file_server import FileServer, be_impatient, served_split


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """The corpus of lane_corpus.py in small tars; who asks for it is impatient."""
    be_impatient(monkeypatch)
    with served_split(tmp_path / "served") as found:
        yield found


@pytest.fixture
def data(server: FileServer, tmp_path: Path) -> DataConfig:
    return DataConfig(path=server.url, cache=str(tmp_path / "cache"))

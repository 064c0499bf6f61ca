"""A run directory, and the store of MLflow that it is sent to."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tracked import Sent


@pytest.fixture
def sent(sqlite_uri: str, client: Any, tmp_path: Path) -> Sent:
    return Sent(sqlite_uri, client, tmp_path / "run")

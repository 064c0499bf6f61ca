"""Fixtures of the tests of texts that are written and read."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of folders are copied into the test's folder, and not into the user's."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

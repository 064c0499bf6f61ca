"""The examples of the docstrings give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dist_mem

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["memory", "model", "training"])
def test_examples_of_the_docstrings(name: str, api_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(api_folder)
    module = import_module(f"dist_mem.api.{name}")
    result = doctest.testmod(module, extraglobs={"dist_mem": dist_mem, "torch": torch})
    assert result.failed == 0 and result.attempted > 1

"""Code that torch.compile reads does not change named tuples by `_replace`, which torch 2.11 compiles wrongly."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("folder", ["memory", "nn"])
def test_no_memory_or_layer_calls_replace(folder: str) -> None:
    files = sorted((ROOT / "dist_mem" / folder).rglob("*.py"))
    assert files and not [path for path in files if "._replace(" in path.read_text(encoding="utf-8")]

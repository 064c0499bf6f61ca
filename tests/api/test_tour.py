"""The cells of examples/tour.ipynb run in order, from an empty folder, and draw their pictures."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from tests.support.paths import EXAMPLES, ROOT

pytestmark = pytest.mark.pages


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt.switch_backend("Agg")
    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and not [cell for cell in notebook["cells"] if cell.get("outputs")]
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    finally:
        plt.close("all")
    assert len(shown) == 3 and (tmp_path / "runs" / "tour" / "half.mem").exists(), "one picture, then both"
    assert names["found"].gain[200:].any()

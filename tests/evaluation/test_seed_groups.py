"""Runs of a comparison that differ only in their seeds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dist_mem.evaluation import compare
from dist_mem.evaluation.compare import seed_lines
from dist_mem.evaluation.scores import write_report
from tests.evaluation.test_bootstrap import report


def test_runs_of_one_label_are_one_line_with_their_spread() -> None:
    reports = [report(*losses * 3) for losses in ([500.0, 100.0, 900.0], [400.0, 0.0, 800.0], [380.0, 20.0, 800.0])]
    assert seed_lines(["a", "b", "c"], reports) == []
    head, *rows = seed_lines(["a", "b", "b"], reports)[2:]
    assert head.split("  ")[0] == "seeds together"
    first, other = (row.split() for row in rows)
    assert first == ["a", "1", "12.18", "n/a"]
    assert other[:5] == ["b", "2", "7.39", "±", "0.00"]  # exp((500 - 100) / 200) = exp(1200 / 600) = 7.39 of both
    low, _, high = other[-3:]  # of 9 documents with gains of 1.1, 0.9 and 1 nats
    assert math.exp(0.9) < float(low) < math.e < float(high) < math.exp(1.1)


def test_compare_groups_runs_by_their_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind, seed in (("none", "none", 0), ("xl0", "transformer_xl", 0), ("xl1", "transformer_xl", 1)):
        write_report(
            report(*[500.0, 100.0] * 4), tmp_path / name / "evaluations", "test-step-00000007", metadata={"step": 7}
        )
        config = f"name: {name}\nmemory: {{kind: {kind}}}\ntrain: {{seed: {seed}}}\ndata: {{seed: {seed}}}\n"
        (tmp_path / name / "config.yaml").write_text(config, encoding="utf-8")
    assert compare.run([tmp_path / name for name in ("none", "xl0", "xl1")]) == 0
    assert re.search(r"\nTransformer-XL +2 +4\.48 ± 0\.00 +n/a +1\.000 to 1\.000\n", capsys.readouterr().out)
    assert compare.run([tmp_path / name for name in ("none", "xl0")]) == 0
    assert "seeds together" not in capsys.readouterr().out

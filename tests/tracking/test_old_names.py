"""Metrics under the names of earlier versions: readers give the present names, and no curve in MLflow is cut in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_mem.launch.status import _last_point
from dist_mem.tracking.groups import OLD_NAMES, in_group, naming_of
from dist_mem.tracking.tracker import MetricsFile, read_points


@pytest.mark.parametrize(("old", "present"), OLD_NAMES.items())
def test_metrics_files_are_read_under_the_present_names(tmp_path: Path, old: str, present: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "time": 0.0, "metrics": {"loss": 2.0, old: 1.5}}) + "\n")
    assert read_points(path)[0].metrics == {"loss": 2.0, present: 1.5}
    assert _last_point(path) == (1, {"loss": 2.0, present: 1.5})
    MetricsFile(path, first_step=1).close("FINISHED")  # as a resumed run opens it
    assert json.loads(path.read_text())["metrics"] == {"loss": 2.0, present: 1.5}


@pytest.mark.parametrize(
    ("name", "plain", "in_former_groups"),
    [
        ("peak_memory_gb", "memory_gb", "system/memory_gb"),
        ("memory_gb", "memory_gb", "system/memory_gb"),  # a point that an older version has logged
        ("recall_perplexity", "recall_perplexity", "recall/perplexity"),
        (
            "validation/recall_perplexity_memory",
            "validation/recall_perplexity_memory",
            "recall/validation/perplexity_memory",
        ),
        (
            "validation/recall_accuracy_memory",
            "validation/recall_accuracy_memory",
            "recall_accuracy/validation/accuracy_memory",
        ),
        ("loss", "loss", "train/loss"),
    ],
)
def test_runs_that_began_before_keep_their_names_in_mlflow(name: str, plain: str, in_former_groups: str) -> None:
    assert (naming_of(1)(name), naming_of(2)(name), naming_of(3)(name)) == (plain, in_former_groups, in_group(name))
    assert in_group(in_former_groups) == in_former_groups

"""`train.profile`: a trace of some steps, and the table of its costliest operators."""

import gzip
import json
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_USAGE, UnusableError
from dist_mem.tracking.log import METRICS_FILE, find_entries
from dist_mem.training.profile import NUM_OPERATORS, refuse_profile_outside
from tests.support.jobs import build_books, losses, train_here, write_config
from tests.support.messages import refused, said
from tests.support.ranks import Pools
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("steps", ["[10, 10]", "[10]", "[5, 13]", "[-1, 3]"])
def test_steps_that_cannot_be_profiled_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    config = write_config(tmp_path / "run.yaml", tmp_path / "none", tmp_path / "run")
    assert main(["train", str(config), f"train.profile={steps}", "--check"]) == EXIT_USAGE
    said(capsys.readouterr().err, "train.profile")


def test_steps_after_the_end_are_refused_once_the_data_says_how_many_there_are() -> None:
    with refused(UnusableError, "train.profile"):
        refuse_profile_outside(tiny_config({"train": {"profile": [5, 13]}}).train, 12)
    refuse_profile_outside(tiny_config({"train": {"profile": [5, 12]}}).train, 12)


def test_trace_and_table_are_written_and_change_no_metric(tmp_path: Path, rank_pool: Pools) -> None:
    """Rank 0 of two writes a trace in the format that Perfetto reads; the losses are those of a run without one."""
    books = build_books(tmp_path / "books")
    mlflow = {"tracking": {"mlflow": True, "send": "never", "system_metrics": False}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", mlflow)
    plain = write_config(tmp_path / "plain.yaml", books, tmp_path / "plain")
    assert rank_pool(2).run(train_here, config, ["train.profile=[3,5]"]) == [0, 0]
    assert rank_pool(2).run(train_here, plain) == [0, 0]

    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps-3-5.json.gz", "steps-3-5.txt"]
    with gzip.open(folder / "steps-3-5.json.gz", "rt") as file:
        trace = json.load(file)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= event.keys() and event["dur"] >= 0 for event in spans)
    assert sum(event["name"] == "aten::embedding" for event in spans) == 2 * 2  # updates x forwards of this rank
    table = (folder / "steps-3-5.txt").read_text().splitlines()
    rules = [number for number, line in enumerate(table) if line.startswith("---")]
    operators = [line.strip().split("  ")[0].rstrip(".") for line in table[rules[1] + 1 : rules[2]]]
    assert len(operators) == NUM_OPERATORS
    traced = {event["name"] for event in spans}
    assert all(any(name.startswith(operator) for name in traced) for operator in operators), operators
    attached = [entry.body["path"] for entry in find_entries(tmp_path / "run" / METRICS_FILE, "artifact")]
    assert {"profile/steps-3-5.json.gz", "profile/steps-3-5.txt"} <= {*attached}

    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

"""Sinks of the user's own files: they get what a run records, add metrics, and stop no training."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import UnusableError
from dist_mem.tracking import tracker
from dist_mem.tracking.log import METRICS_FILE, find_entries, read_points
from dist_mem.tracking.own_sinks import load_sink, sink_sources
from dist_mem.tracking.start import check_sinks
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.tracked import config_for, job, start

EXAMPLE = ROOT / "examples" / "csv_sink.py"
BEGIN = "from dist_mem.tracking.tracker import Sink\nclass Own(Sink):\n    def __init__(self, run_dir, first_step): "


def with_sinks(*sinks: str) -> Any:
    return config_for("unused", tracking={"mlflow": False, "sinks": list(sinks)})


def test_the_example_is_that_of_the_page_and_its_metric_is_logged_once_a_step(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "tracking.md").read_text(encoding="utf-8")
    assert EXAMPLE.read_text(encoding="utf-8").partition("\n\n\n")[2] in page
    config = with_sinks(f"{EXAMPLE}:CsvSink")
    job(config, tmp_path, {1: 2.0, 2: 4.0})
    job(config, tmp_path, {2: 4.0, 3: 8.0}, first_step=1)
    points = read_points(tmp_path / METRICS_FILE)
    assert [(point.step, point.metrics["loss"]) for point in points] == [(1, 2.0), (2, 4.0), (3, 8.0)]
    bits = [point.metrics["bits_per_token"] for point in points]
    assert bits == [pytest.approx(loss * 1.442695) for loss in (2.0, 4.0, 8.0)]
    lines = (tmp_path / "losses.csv").read_text().splitlines()
    assert lines == [f"{step},{bits[step - 1]}" for step in (1, 2, 2, 3)]
    assert sink_sources(config.tracking.sinks) == {"sinks/csv_sink.py": EXAMPLE.read_text(encoding="utf-8")}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "there is no file"),
        ("x = 1\n", "has no Own"),
        ("Own = 3\n", "dist_mem.tracking.tracker.Sink"),
        ("a = 1\nb = a.nothing\n", "own.py, line 2"),
        ("# -*- coding: latin-1 -*-\n# \u00e9\n", "own.py is not UTF-8"),
    ],
)
def test_a_file_that_gives_no_sink_is_refused_before_the_start(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UnusableError, match=re.escape(named)) as caught:
        check_sinks(with_sinks(f"{path}:Own").tracking)
    assert "tracking.sinks" in str(caught.value) or str(path) in str(caught.value)


@pytest.mark.parametrize("name", [".own.py", "o\\wn.py", f"{'o' * 228}.py"])
def test_a_file_whose_copy_no_checkpoint_could_have_is_refused_before_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(BEGIN + "pass\n")
    with refused(UnusableError, "tracking.sinks", tmp_path / name):
        check_sinks(with_sinks(f"{tmp_path / name}:Own").tracking)


def test_a_constructor_that_fails_ends_the_start_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BEGIN + "1 / 0\n")
    named = f"{tmp_path / 'own.py'}:Own"
    load_sink(named)
    with pytest.raises(UnusableError, match=r"tracking\.sinks: .*own\.py:Own, line 3: ZeroDivisionError"):
        start(with_sinks(named), tmp_path / "run")


def test_a_sink_does_not_change_the_metrics_of_the_run(tmp_path: Path) -> None:
    body = "def further_metrics(self, step, metrics): metrics['loss'] = 7.0; return {'a': metrics.pop('loss')}"
    (tmp_path / "own.py").write_text(f"{BEGIN}pass\n    {body}\n")
    job(with_sinks(f"{tmp_path / 'own.py'}:Own"), tmp_path / "run", {1: 2.0})
    (point,) = read_points(tmp_path / "run" / METRICS_FILE)
    assert (point.metrics["loss"], point.metrics["a"]) == (2.0, 7.0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def log(self, point): point.nothing", "line 4: AttributeError"),
        ("def further_metrics(self, step, metrics): return {'loss': 1.0}", "ValueError: the run logs 'loss' itself"),
        ("def further_metrics(self, step, metrics): return {'train/loss': 1.0}", "logs 'train/loss' itself"),
        ("def further_metrics(self, step, metrics): return {'a': 1.0, 'train/a': 2.0}", "logs 'train/a' itself"),
        ("def further_metrics(self, step, metrics): return {'a': 'b'}", "ValueError: could not convert"),
    ],
)
def test_an_error_of_a_sink_is_one_line_and_costs_no_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, reason: str
) -> None:
    (tmp_path / "own.py").write_text(f"{BEGIN}pass\n    {body}\n")
    job(with_sinks(f"{tmp_path / 'own.py'}:Own"), tmp_path / "run", {1: 2.0, 2: 4.0})
    printed = capsys.readouterr().err
    assert printed.count("warning: tracking.sinks: ") == 1 and reason in printed
    assert [point.metrics["loss"] for point in read_points(tmp_path / "run" / METRICS_FILE)] == [2.0, 4.0]


def test_a_sink_that_never_closes_delays_the_end_by_a_limit_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_SECONDS", 0.1)
    (tmp_path / "own.py").write_text(f"{BEGIN}pass\n    def close(self, status): __import__('time').sleep(600)\n")
    began = time.monotonic()
    job(with_sinks(f"{tmp_path / 'own.py'}:Own"), tmp_path / "run", {1: 2.0}, status="FINISHED")
    assert time.monotonic() - began < limit(10)
    assert f"{tmp_path / 'own.py'}:Own: its close has not ended after 0.1 s" in capsys.readouterr().err
    statuses = [entry.body["status"] for entry in find_entries(tmp_path / "run" / METRICS_FILE, "status")]
    assert statuses == ["RUNNING", "FINISHED"]

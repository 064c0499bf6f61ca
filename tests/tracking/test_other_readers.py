"""What TensorBoard and Prometheus read of a run, by their own readers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dist_mem.errors import UnusableError
from dist_mem.tracking.log import METRICS_FILE, Header, Log, Point, read_points, write_log
from dist_mem.tracking.names import in_group
from dist_mem.tracking.readers import MARK, TensorBoardFiles
from dist_mem.tracking.start import check_sinks
from tests.support.faults import small_disk
from tests.support.messages import refused
from tests.support.tracked import config_for, job, start, steps

BOARD: Any = {"mlflow": False, "tensorboard": True}


def shown(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """Return the points (step, value) of a curve of TensorBoard."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def recorded(run_dir: Path) -> list[tuple[int, float]]:
    return [(point.step, point.metrics["loss"]) for point in read_points(run_dir / METRICS_FILE)]


def test_tensorboard_shows_every_step_of_metrics_jsonl_once_after_a_kill_a_resume_and_a_rollback(
    tmp_path: Path,
) -> None:
    config = config_for("sqlite:///unused.db", tracking=BOARD)
    killed = start(config, tmp_path)  # never closed
    for step in range(1, 8):
        killed.log(step, {"loss": float(step)})
    assert shown(tmp_path / "tensorboard") == recorded(tmp_path)
    resumed = start(config, tmp_path, first_step=5)
    for step, loss in {6: 60.0, 7: 70.0, 8: 80.0}.items():
        resumed.log(step, {"loss": loss})
    resumed.rewind(6)
    resumed.log(7, {"loss": 700.0})
    resumed.close("FINISHED")
    assert shown(tmp_path / "tensorboard") == recorded(tmp_path) == [*steps(1, 5).items(), (6, 60.0), (7, 700.0)]
    killed.close("KILLED")


def test_tensorboard_has_the_points_from_while_it_was_switched_off_and_none_that_were_superseded_then(
    tmp_path: Path,
) -> None:
    on, off = (config_for("sqlite:///unused.db", tracking=BOARD | {"tensorboard": is_on}) for is_on in (True, False))
    job(off, tmp_path, steps(1, 3))
    job(on, tmp_path, steps(3, 6), first_step=2)
    assert shown(tmp_path / "tensorboard") == [*steps(1, 6).items()]
    job(off, tmp_path, {4: 40.0, 5: 50.0}, first_step=3)
    job(on, tmp_path, {6: 60.0}, first_step=5)
    assert shown(tmp_path / "tensorboard") == recorded(tmp_path)
    assert recorded(tmp_path) == [*steps(1, 3).items(), (4, 40.0), (5, 50.0), (6, 60.0)]


def test_tensorboard_has_every_point_once_if_its_mark_is_old_or_damaged(tmp_path: Path) -> None:
    config, mark = config_for("sqlite:///unused.db", tracking=BOARD), tmp_path / "tensorboard" / MARK
    job(config, tmp_path, steps(1, 4))
    for text in ("3\n", "three\n"):
        mark.write_text(text)
        job(config, tmp_path, {}, first_step=4)
        assert shown(tmp_path / "tensorboard") == recorded(tmp_path) == [*steps(1, 4).items()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    write_log(tmp_path / METRICS_FILE, Header("uid", "run", None))
    with closing(Log(tmp_path / METRICS_FILE)) as log:
        yield log


def test_a_node_whose_clock_is_behind_continues_the_curves(tmp_path: Path, log: Log) -> None:
    folder = tmp_path / "board"
    folder.mkdir()
    (folder / "events.out.tfevents.9999999998.of_the_future").touch()
    sink = TensorBoardFiles(folder, log, first_step=0)
    sink.close("KILLED")
    assert sorted(path.name for path in folder.iterdir())[-1].startswith("events.out.tfevents.9999999999.")


def test_a_full_disk_is_an_error_that_names_the_event_file(tmp_path: Path, log: Log) -> None:
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        sink = TensorBoardFiles(disk, log, first_step=0)
        with refused(OSError, "events.out.tfevents"):
            for step in range(1000):
                sink.log(Point(step, 0.0, {"loss": 1.0}))
        sink.close("FAILED")


def test_prometheus_reads_the_last_value_of_every_metric_and_the_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "demo.prom"
    tracker = start(config_for("unused", tracking={"mlflow": False, "prometheus": str(path)}), tmp_path)
    tracker.log(10, {"loss": 3.0, "goodput/useful": 0.5})
    tracker.log(20, {"loss": 2.0})
    tracker.log(20, {"validation/word_perplexity": 50.0})
    tracker.close("FINISHED")
    samples = [sample for family in text_string_to_metric_families(path.read_text()) for sample in family.samples]
    assert all(sample.labels == {"run": "demo"} for sample in samples)
    figures = {sample.name.removeprefix("dist_mem_"): sample.value for sample in samples}
    *_, last = read_points(tmp_path / METRICS_FILE)
    assert figures == {
        "train_loss": 2.0,
        "system_goodput_useful": 0.5,
        "eval_validation_word_perplexity": 50.0,
        "step": 20.0,
        "heartbeat_timestamp_seconds": last.time,
    }
    assert [*tmp_path.glob("*prom*")] == [path]
    job(config_for("unused", tracking={"mlflow": False, "prometheus": str(path)}), tmp_path, {21: 1.0}, first_step=20)
    assert "dist_mem_eval_validation_word_perplexity" in path.read_text(), "from before the resume"


@pytest.mark.parametrize(
    ("tracking", "package"),
    [
        ({"wandb": True}, "wandb"),
        ({"tensorboard": True}, "tensorboard"),
        ({"prometheus": "x.prom"}, "prometheus_client"),
        ({"prometheus": "x.txt"}, None),
        ({"prometheus": "nowhere/x.prom"}, None),
    ],
)
def test_what_cannot_be_written_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking: dict[str, Any], package: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if package:
        monkeypatch.setitem(sys.modules, package, None)  # as Python sees a package that is not installed
    with refused(UnusableError, package or "tracking.prometheus"):
        check_sinks(config_for("unused", tracking={"mlflow": False} | tracking).tracking)
    assert not [*tmp_path.iterdir()]


NAMES = {
    "loss": "train/loss",
    "divergence/skipped": "train/divergence/skipped",
    "validation/word_perplexity": "eval/validation/word_perplexity",
    "memory/gain": "memory/gain",
    "peak_memory_gb": "system/peak_memory_gb",
    "recall_perplexity": "recall_ppl/perplexity",
    "validation/recall_accuracy_memory": "recall_accuracy/validation/accuracy_memory",
    "goodput/useful": "system/goodput/useful",
    "checkpoint/bytes": "system/checkpoint/bytes",
    "system/cpu_utilization_percentage": "system/cpu_utilization_percentage",
}


def test_every_metric_is_in_a_group_and_keeps_it() -> None:
    assert {name: in_group(name) for name in NAMES} == NAMES
    assert [in_group(name) for name in NAMES.values()] == [*NAMES.values()]

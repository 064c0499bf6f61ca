"""What TensorBoard and Weights & Biases read of a run."""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from dist_mem.errors import UnusableError
from dist_mem.tracking.log import METRICS_FILE, Header, Log, Point, read_points, write_log
from dist_mem.tracking.readers import MARK, WANDB_ID_FILE, TensorBoardFiles
from dist_mem.tracking.start import check_sinks
from tests.support.faults import small_disk
from tests.support.forked_ranks import SIGKILLED
from tests.support.limits import limit, wait_until
from tests.support.messages import refused
from tests.support.paths import ROOT
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


def test_tensorboard_has_what_is_made_again_of_the_restored_step_once(tmp_path: Path) -> None:
    config = config_for("sqlite:///unused.db", tracking=BOARD)
    for _ in range(3):
        job(config, tmp_path, {5: 5.0, 6: 6.0}, first_step=5, num_points=0)
        assert shown(tmp_path / "tensorboard") == recorded(tmp_path) == [(5, 5.0), (6, 6.0)]


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


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_package_that_is_missing_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # as Python sees a package that is not installed
    with refused(UnusableError, package):
        check_sinks(config_for("unused", tracking={"mlflow": False, package: True}).tracking)
    assert not [*tmp_path.iterdir()]


# Weights & Biases

_BLOCK = 32768  # bytes
_FULL, _LAST = 1, 4  # kinds of chunks that end a message


def messages(path: Path) -> Iterator[Any]:
    """Yield the messages of `run-ID.wandb`, in order."""
    data, position, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:  # no chunk begins there
            position += _BLOCK - position % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or position + 7 + size > len(data):  # still being written
            break
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (_FULL, _LAST):
            message = wandb_internal_pb2.Record()  # type: ignore[attr-defined] # protobuf makes it at import
            message.ParseFromString(whole)
            whole = b""
            yield message


def points(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of every logged point."""
    found = []
    for message in messages(path):
        if message.WhichOneof("record_type") == "history":
            logged = message.history.item
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in logged}
            found.append((items["_step"], {name: value for name, value in items.items() if name[0] != "_"}))
    return found


ON: dict[str, Any] = {"mlflow": False, "wandb": True}


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)


def kinds(path: Path) -> list[str]:
    return [message.WhichOneof("record_type") for message in messages(path)]


def test_a_restarted_run_is_one_run_with_grouped_names_and_its_earlier_points(tmp_path: Path) -> None:
    hooks = sys.excepthook, sys.exit
    job(config_for("unused", tracking=ON | {"wandb": False}), tmp_path, steps(1, 3))
    tracker = start(config_for("unused", tracking=ON), tmp_path, first_step=2)
    tracker.log(3, {"loss": 30.0})
    tracker.log(3, {"validation/word_perplexity": 50.0})
    tracker.close("KILLED")
    job(config_for("unused", tracking=ON), tmp_path, steps(4, 5), first_step=3)
    assert (sys.excepthook, sys.exit) == hooks
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    run_id = (tmp_path / WANDB_ID_FILE).read_text().strip()
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    wait_until(lambda: all("exit" in kinds(path) for path in files), "the ends of the runs in the files")
    first, second = map(points, files)
    assert [(step, metrics["train/loss"]) for step, metrics in first] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert first[-1][1]["eval/validation/word_perplexity"] == 50.0
    assert [(step, metrics["train/loss"]) for step, metrics in second] == [(4, 4.0), (5, 5.0)]
    (run,) = (message.run for message in messages(files[0]) if message.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("dist_mem", "demo")
    assert "optimizer" in {item.key for item in run.config.update}


def test_points_of_jobs_with_w_and_b_disabled_reach_it_from_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    job(config_for("unused", tracking=ON), tmp_path, steps(1, 3))
    monkeypatch.delenv("WANDB_MODE")
    job(config_for("unused", tracking=ON), tmp_path, steps(4, 5), first_step=3)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: "exit" in kinds(path), "the end of the run in its file")
    assert [(step, metrics["train/loss"]) for step, metrics in points(path)] == [*steps(1, 5).items()]


KILLED = """
import os, signal
from pathlib import Path
from tests.support.tracked import config_for, start, steps
tracker = start(config_for("unused", tracking={"mlflow": False, "wandb": True}), Path("."))
for step, loss in steps(1, 40).items():
    tracker.log(step, {"loss": loss})
tracker.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_after_a_kill_has_every_point_that_the_killed_client_kept_in_memory(tmp_path: Path) -> None:
    """Also those from before a checkpoint, and each once in its folder."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{KILLED}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=limit(120))
    assert done.returncode == SIGKILLED, done.stderr
    (lost,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert {step for step, _ in points(lost)} < {*steps(1, 40)}, "the client kept the last one, at least"
    killed_at = int(time.time())
    wait_until(lambda: int(time.time()) > killed_at, "the next second, because the folder is named after it")
    job(config_for("unused", tracking=ON), tmp_path, steps(41, 43), first_step=40)
    (path,) = {*tmp_path.glob("wandb/offline-run-*/*.wandb")} - {lost}
    wait_until(lambda: "exit" in kinds(path), "the end of the run in its file")
    assert [(step, metrics["train/loss"]) for step, metrics in points(path)] == [*steps(1, 43).items()]


def test_a_run_that_w_and_b_continues_gets_no_step_again_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online, where a client that is given such a step ignores it and warns each time."""
    logged: list[int] = []

    class Continued:
        id, starting_step = "x", 3

        def log(self, values: dict[str, float], *, step: int) -> None:
            logged.append(step)

        def finish(self, exit_code: int) -> None:
            pass

    job(config_for("unused", tracking=ON | {"wandb": False}), tmp_path, steps(1, 4))
    monkeypatch.setattr(wandb, "init", lambda **_: Continued())
    job(config_for("unused", tracking=ON), tmp_path, steps(5, 6), first_step=4)
    assert logged == [3, 4, 5, 6]


def test_an_error_of_the_client_is_one_line_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    tracker = start(config_for("unused", tracking=ON), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "W&B" in line)
    assert line.startswith("warning: W&B: ") and "metrics.jsonl has every point" in line

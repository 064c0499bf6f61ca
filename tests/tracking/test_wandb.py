"""The run of Weights & Biases: what its file has, one run after a restart, and a client that fails."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from dist_mem.tracking.readers import WANDB_ID_FILE
from tests.support.limits import wait_until
from tests.support.tracked import config_for, job, start, steps

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
    for path in files:
        wait_until(lambda path=path: "exit" in kinds(path), "the end of the run in the file")
    first, second = map(points, files)
    assert [(step, metrics["train/loss"]) for step, metrics in first] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert first[-1][1]["eval/validation/word_perplexity"] == 50.0
    assert [(step, metrics["train/loss"]) for step, metrics in second] == [(4, 4.0), (5, 5.0)]
    (run,) = (message.run for message in messages(files[0]) if message.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("dist_mem", "demo")
    assert "optimizer" in {item.key for item in run.config.update}


def test_an_error_of_the_client_is_one_line_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    tracker = start(config_for("unused", tracking=ON), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "W&B" in line)
    assert line.startswith("warning: W&B: ") and "metrics.jsonl has every point" in line

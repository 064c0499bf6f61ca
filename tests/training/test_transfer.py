"""Batches are copied to a GPU on a stream of their own; on CPUs, stand-ins for streams record what would happen."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import Batch, Update
from dist_mem.training import feed
from dist_mem.training.feed import DeviceTransfer, on_device


class Stream:
    """A stream that records the order of what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return "copied"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        self.log.append(f"begin {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"end {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with a main stream, one more, and batches."""
    log: list[str] = []
    side, main = Stream("side", log), Stream("main", log)
    streams = {"Stream": lambda _: side, "current_stream": lambda _: main, "stream": lambda stream: stream}
    monkeypatch.setattr(feed.torch, "cuda", SimpleNamespace(**streams))

    def copied(batch: Batch, device: torch.device) -> Batch:
        log.append(f"copy to {device}")
        return batch

    monkeypatch.setattr(Batch, "to", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: log.append(f"kept for {stream.name}"), raising=False)
    return log


def update_of(num_batches: int) -> Update:
    rows = torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(rows, rows, rows[:, 0], rows[:, 0] > 0, rows[:, 0], None)
    return Update([batch] * num_batches, rows, [6] * num_batches, 0.0, 0)


def test_on_cpus_a_step_uses_the_batch_itself() -> None:
    started = DeviceTransfer(torch.device("cpu")).start(update_of(1))
    assert on_device(started, torch.device("cpu"))[0].tokens is started.batches[0].tokens


def test_copies_run_on_their_own_stream_and_the_step_waits_for_them_there(log: list[str]) -> None:
    started = DeviceTransfer(torch.device("cuda")).start(update_of(2))
    assert log == ["begin side", "copy to cuda", "copy to cuda", "event on side", "end side"]
    log.clear()
    assert len(on_device(started, torch.device("cuda"))) == 2
    assert log == ["main waits for copied", *["kept for main"] * 10]

"""Batches are copied to a GPU on a stream of their own; on CPUs, stand-ins for streams record what would happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import Batch, Update
from dist_mem.training import feed
from dist_mem.training.feed import Transfer, on_device

CPU = torch.device("cpu")


class Stream:
    """A stream that records the order of what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return "copied"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Cuda:
    """A stand-in for torch.cuda with a main stream and one more."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802  # torch's name
        return Stream("side", self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream("main", self.log)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"begin {stream.name}")
        yield
        self.log.append(f"end {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(feed.torch, "cuda", stand_in)
    monkeypatch.setattr(
        Batch, "to", lambda batch, device: stand_in.log.append(f"copy to {device}") or batch._replace(recall=None)
    )
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: stand_in.log.append(f"kept for {stream.name}"), raising=False
    )
    return stand_in


def update_of(num_batches: int) -> Update:
    rows = torch.zeros(2, 3, dtype=torch.int64)
    batch = Batch(rows, rows, rows[:, 0], rows[:, 0] > 0, rows[:, 0], None)
    return Update([batch] * num_batches, rows, [6] * num_batches, 0.0, 0)


def test_copies_run_on_their_own_stream_and_the_step_waits_for_them_there(cuda: Cuda) -> None:
    started = Transfer(torch.device("cuda")).start(update_of(2))
    assert cuda.log == ["begin side", "copy to cuda", "copy to cuda", "event on side", "end side"]
    cuda.log.clear()
    assert len(on_device(started, torch.device("cuda"))) == 2
    assert cuda.log == ["main waits for copied", *["kept for main"] * 10]


def test_on_cpus_nothing_is_copied_ahead() -> None:
    update: Any = update_of(1)
    carrier = Transfer(CPU)
    assert not carrier.needs_pinned
    assert carrier.start(update) is update
    assert on_device(update, CPU)[0].tokens is update.batches[0].tokens

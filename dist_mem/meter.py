"""What a run measures about itself between two logged points."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dist_mem.data.batch import Update
from dist_mem.engine import Engine


class Meter:
    """Sums since the last `read`; every rank keeps one, rank 0's is logged."""

    def __init__(self, *, lane_segments_per_update: int) -> None:
        self._lane_segments = lane_segments_per_update
        self._documents = 0
        self._skipped = 0
        self._epoch = 0.0
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._steps = 0
        self._scored = 0
        self._nll = 0.0
        self._aux = 0.0
        self._waited = 0.0

    def timed_next(self, updates: Iterator[Update]) -> Update:
        """The next update; the time spent waiting for it is what `data_wait_share` reports."""
        began = time.perf_counter()
        update = next(updates)
        self._waited += time.perf_counter() - began
        return update

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent here, saving or evaluating, is no training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def add(self, update: Update, nll: float, aux: float, num_scored: int) -> None:
        """Count one update; `nll`, `aux` and `num_scored` are sums over all ranks."""
        self._steps += 1
        self._nll += nll
        self._aux += aux
        self._scored += num_scored
        self._epoch = update.epoch
        self._documents += update.documents_started
        self._skipped += update.documents_skipped

    def read(self, engine: Engine) -> dict[str, float]:
        """The metrics of a logged point, and a fresh start.

        loss is nats per token averaged over all tokens since the last point; documents count this rank's since the
        start of this job; memory is this process's peak so far in GB (the GPU's where there is one).
        """
        seconds = time.perf_counter() - self._began
        loss = self._nll / self._scored if self._scored else math.nan
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "tokens_per_second": self._scored / seconds,
            "step_seconds": seconds / max(1, self._steps),
            "data_wait_share": self._waited / seconds,
            "grad_norm": engine.gradient_norm(),
            "lr": engine.lr,
            "epoch": self._epoch,
            "documents": float(self._documents),
            "documents_skipped": float(self._skipped),
            "memory_gb": peak_memory_gb(),
        }
        if self._aux:
            metrics["aux_loss"] = self._aux / (self._lane_segments * max(1, self._steps))
        self._restart()
        return metrics


def peak_memory_gb() -> float:
    """Peak memory of this process, GB of 10^9 bytes: allocated on the GPU, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

"""Training metrics, accumulated between two logged points.

Checkpoints contain all sums, so that a resumed run logs the same points as an uninterrupted one, even if it was stopped
between two points.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from dist_mem.data.batch import Update
from dist_mem.engine.gradient_norms import Norms
from dist_mem.runtime.figures import exponential
from dist_mem.training import goodput
from dist_mem.training.mfu import Utilisation

# Metrics of the machine, not of the training: they differ when a step is repeated.
MEASUREMENTS = frozenset(
    {"tokens_per_second", "tokens_read_per_second", "step_seconds", "data_wait_share", "mfu", "peak_memory_gb"}
    | {"num_alloc_retries", "num_ooms"}
    | {"checkpoint/seconds", "checkpoint/stall_seconds", "checkpoint/bytes", "straggler/ratio"}
    | goodput.METRICS
)

LOGGED = "memory/"  # prefix of the metrics that memories log: MemoryOutput.logs


class Totals(NamedTuple):
    """Sums over all ranks, of one or several updates."""

    nll: float = 0.0  # nats, over the scored tokens
    aux: float = 0.0  # auxiliary losses, over lanes and segments
    recall_nll: float = 0.0  # nats, over the recall tokens; part of nll
    num_scored: float = 0.0
    num_recall: float = 0.0
    documents: float = 0.0  # started
    documents_skipped: float = 0.0
    num_read: float = 0.0  # lane-segments with tokens
    num_tokens: float = 0.0  # read
    num_learned: float = 0.0  # of them, in micro-batches with a gradient


class Gradients(Protocol):
    """The metrics of an engine that are logged."""

    @property
    def lr(self) -> float: ...
    def gradient_norm(self) -> float: ...
    def gradient_norms(self) -> Norms | None: ...


class Meter:
    """Sums since the last `read`. Every rank keeps one; that of rank 0 is logged."""

    def __init__(
        self,
        *,
        lane_segments_per_update: int,
        utilisation: Utilisation | None = None,
        saved: Mapping[str, float] | None = None,
    ) -> None:
        """Start at 0, or from a saved `state()`."""
        self._lane_segments = lane_segments_per_update
        self._utilisation = utilisation
        self._paused_seconds = 0.0
        self._paused_at: float | None = None  # in seconds of `training_seconds`, which does not go on
        self.load(saved or {})

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue from a saved `state()`, {}: from 0."""
        self._totals = Totals(**{name: saved.get(name, 0.0) for name in Totals._fields})
        self._logs = {name: metric for name, metric in saved.items() if name.startswith(LOGGED)}
        self._steps = saved.get("steps", 0.0)
        self._trained = saved.get("trained", self._steps)
        self._tokens_read = saved.get("tokens_read", None if saved else 0.0)  # None: not saved by an older version
        self._saved_times = saved.get("seconds", 0.0), saved.get("waited", 0.0)
        self.begin()
        self._epoch, self._is_read_only = 0.0, True  # of the last update
        self._noted: dict[str, float] = {}

    def begin(self) -> None:
        """Start the clock: what was done since the meter was made or loaded is no training."""
        seconds, self._waited = self._saved_times
        self._began = self.training_seconds() - seconds

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint; JSON preserves it exactly."""
        seconds = self.training_seconds() - self._began
        others = {"steps": self._steps, "trained": self._trained, "waited": self._waited, "seconds": seconds}
        since_start = {} if self._tokens_read is None else {"tokens_read": self._tokens_read}
        return {**self._totals._asdict(), **self._logs, **others, **since_start}

    def time_next(self, updates: Iterator[Update]) -> Update:
        """Return the next update; `data_wait_share` reports the time spent waiting for it."""
        began = self.training_seconds()
        update = next(updates)
        self._waited += self.training_seconds() - began
        return update

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time spent in the context, for example on a save or an evaluation, from the training time."""
        outer, at = self._paused_at, self.training_seconds()
        self._paused_at = at
        try:
            yield
        finally:
            self._paused_at = outer
            self._paused_seconds = time.perf_counter() - at

    def training_seconds(self) -> float:
        """Return the time of a clock that stops while the meter is paused."""
        return time.perf_counter() - self._paused_seconds if self._paused_at is None else self._paused_at

    def add(
        self,
        totals: Totals,
        *,
        epoch: float,
        logs: Mapping[str, float] = MappingProxyType({}),
        is_read_only: bool = False,
    ) -> None:
        """Count one update; `epoch` is `Update.epoch`, `logs` and `is_read_only` are those of `Outcome`."""
        for name, metric in logs.items():
            self._logs[LOGGED + name] = self._logs.get(LOGGED + name, 0.0) + metric
        self._totals = Totals(*map(sum, zip(self._totals, totals, strict=True)))
        if self._tokens_read is not None:
            self._tokens_read += totals.num_tokens
        self._steps += 1
        self._trained += any(totals._replace(documents=0.0, documents_skipped=0.0))  # nothing in a skipped update
        self._epoch, self._is_read_only = epoch, is_read_only

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add metrics that are not measured in every step to the next point; later values replace earlier ones."""
        self._noted.update(metrics)

    def read(self, engine: Gradients) -> dict[str, float]:
        """Return the metrics of a logged point, and reset the sums.

        Losses are in nats per token, averaged over all tokens since the last point. Documents are counted since the
        start of the run. `peak_memory_gb` is that of this process, unless the metric of another one is noted. Metrics
        logged by memories are averaged over blocks and over all lanes that read something since the last point.
        """
        seconds, totals = self.training_seconds() - self._began, self._totals
        loss = totals.nll / totals.num_scored if totals.num_scored else math.nan
        metrics = {
            "loss": loss,
            "perplexity": exponential(loss),
            "tokens_per_second": totals.num_scored / seconds,
            "tokens_read_per_second": totals.num_tokens / seconds,
            "step_seconds": seconds / max(1.0, self._steps),
            "data_wait_share": self._waited / seconds,
            "epoch": self._epoch,
            "documents": totals.documents,
            "documents_skipped": totals.documents_skipped,
            "peak_memory_gb": peak_memory_gb(),
            **self._noted,
        }
        if self._utilisation is not None:
            counts = {"num_tokens": totals.num_tokens, "num_learned": totals.num_learned}
            metrics["mfu"] = self._utilisation.share(**counts, seconds=seconds)
        if not self._is_read_only:
            metrics |= {"grad_norm": engine.gradient_norm(), "lr": engine.lr}
            if norms := engine.gradient_norms():
                metrics |= {"grad_norm_model": norms.model, "grad_norm_aux": norms.auxiliary}
        if totals.num_recall:
            metrics["recall_perplexity"] = exponential(totals.recall_nll / totals.num_recall)
        if totals.aux:
            metrics["aux_loss"] = totals.aux / (self._lane_segments * max(1.0, self._trained))
        if totals.num_read:
            metrics |= {name: metric / totals.num_read for name, metric in self._logs.items()}
        self._totals, self._logs = Totals(documents=totals.documents, documents_skipped=totals.documents_skipped), {}
        self._steps, self._trained, self._waited, self._noted = 0.0, 0.0, 0.0, {}
        self._began += seconds
        return metrics


def allocator_counts() -> dict[str, int]:
    """Return how often the allocator of this process's GPU freed its cache and tried again, or failed; {} on CPUs."""
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.memory_stats()
    return {name: found.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}


def peak_memory_gb() -> float:
    """Return the peak memory of this process in GB of 10^9 bytes: allocated GPU memory, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

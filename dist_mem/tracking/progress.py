"""How far a run has come: a progress bar where somebody watches a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

from dist_mem.tracking.sinks import Point, Sink

# The metrics that the progress line knows by name (dist_mem.meter makes them).
LOSS = "loss"
PERPLEXITY = "perplexity"
TOKENS_PER_SECOND = "tokens_per_second"


def _measures(metrics: Mapping[str, float]) -> Iterator[str]:
    if LOSS in metrics:
        yield f"loss {metrics[LOSS]:.4f}"
    if PERPLEXITY in metrics:
        yield f"ppl {metrics[PERPLEXITY]:.2f}"
    if TOKENS_PER_SECOND in metrics:
        yield f"{metrics[TOKENS_PER_SECOND]:,.0f} tokens/s"


def _details(point: Point) -> str:
    """A point that is not of training but of an evaluation: all of it, the split named once."""
    split = next(iter(point.metrics), "").split("/")[0]
    figures = (f"{name.removeprefix(f'{split}/')} {value:,.2f}" for name, value in point.metrics.items())
    return "  ".join([f"step {point.step}: {split}", *figures])


class ProgressBar(Sink):
    """One bar at the foot of a terminal: loss, perplexity, tokens/s, time left."""

    def __init__(self, *, total_steps: int, first_step: int, stream: TextIO | None = None) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            file=stream or sys.stderr,
            smoothing=0.1,
        )

    def log(self, point: Point) -> None:
        if LOSS not in point.metrics:
            self.message(_details(point))
            return
        self._bar.set_postfix_str("  ".join(_measures(point.metrics)), refresh=False)
        self._bar.update(point.step - self._bar.n)

    def message(self, text: str) -> None:
        self._bar.write(text, file=self._bar.fp)

    def close(self, status: str) -> None:
        self._bar.close()


class ProgressLines(Sink):
    """The same in plain lines, for log files: one every `every` steps and at the last one."""

    def __init__(self, *, total_steps: int, first_step: int, every: int, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._first_step = first_step
        self._every = every
        self._stream = stream or sys.stderr
        self._started = time.monotonic()

    def log(self, point: Point) -> None:
        if LOSS not in point.metrics:
            self.message(_details(point))
        elif point.step % self._every == 0 or point.step >= self._total_steps:
            parts = [
                f"step {point.step}/{self._total_steps}",
                *_measures(point.metrics),
                f"eta {self._time_left(point.step)}",
            ]
            self.message("  ".join(parts))

    def _time_left(self, step: int) -> timedelta:
        steps_done = max(1, step - self._first_step)
        seconds = (time.monotonic() - self._started) / steps_done * max(0, self._total_steps - step)
        return timedelta(seconds=math.ceil(seconds))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def progress_sink(*, total_steps: int, first_step: int, every: int) -> Sink:
    """A bar where somebody watches a terminal, else lines."""
    if sys.stderr.isatty():
        return ProgressBar(total_steps=total_steps, first_step=first_step)
    return ProgressLines(total_steps=total_steps, first_step=first_step, every=every)

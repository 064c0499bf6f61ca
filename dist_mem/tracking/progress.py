"""Show the progress of a run: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from dist_mem.runtime.figures import NO_FIGURE, is_figure
from dist_mem.runtime.progress import time_left
from dist_mem.runtime.terminal import WIDTH, BarStream, colour_first_word
from dist_mem.tracking.log import Point
from dist_mem.tracking.tracker import Sink

# The metrics that the progress line knows by name (dist_mem.training.meter makes them).
LOSS = "loss"
PERPLEXITY = "perplexity"
TOKENS_PER_SECOND = "tokens_per_second"
GAIN = "memory/gain"  # the one metric of an evaluation's passage that is shown


def _measures(metrics: Mapping[str, float]) -> Iterator[str]:
    if LOSS in metrics:
        yield f"loss {metrics[LOSS]:.4f}"
    if PERPLEXITY in metrics:
        yield f"ppl {_format(metrics[PERPLEXITY]):>8}"
    if TOKENS_PER_SECOND in metrics:
        yield f"{metrics[TOKENS_PER_SECOND]:>7,.0f} tokens/s"


def _format(value: float) -> str:
    return f"{value:{',.2f' if abs(value) < 1e5 else '.2e'}}" if is_figure(value) else NO_FIGURE


def _details(point: Point) -> str:
    """Format a point of an evaluation: the metrics of its split, whose name comes once, and the memory's gain.

    The metrics are on as many lines as they need, each below the first.
    """
    split = next(iter(point.metrics), "").split("/")[0]
    shown = {name: value for name, value in point.metrics.items() if name.startswith(f"{split}/") or name == GAIN}
    lines, begin = [""], f"step {point.step}: {split}"
    for name, value in shown.items():
        metric = f"  {_in_words(name.removeprefix(f'{split}/'))} {_format(value)}"
        if len(begin) + len(lines[-1]) + len(metric) > WIDTH:
            lines.append("")
        lines[-1] += metric
    return begin + f"\n{' ' * len(begin)}".join(lines)


def _in_words(name: str) -> str:
    """Return the name of a metric as it is printed: `word ppl`."""
    return name.replace("perplexity", "ppl").replace("/", " ").replace("bits_per_byte", "bits/byte").replace("_", " ")


class ProgressBar(Sink):
    """A bar at the bottom of a terminal: loss, perplexity, tokens/s, time left."""

    def __init__(self, *, total_steps: int, first_step: int, stream: TextIO | None = None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            file=BarStream(stream or sys.stderr),
            smoothing=0.1,
        )

    def log(self, point: Point) -> None:
        if LOSS not in point.metrics:
            self.message(_details(point))
            return
        self._bar.set_postfix_str("  ".join(_measures(point.metrics)), refresh=False)
        self._bar.update(point.step - self._bar.n)

    def message(self, text: str) -> None:
        self._bar.write(colour_first_word(text, sys.stderr), file=self._bar.fp)

    def close(self, status: str) -> None:
        self._bar.close()


class ProgressLines(Sink):
    """Plain lines like those of `ProgressBar`, for log files: one every `every` steps and one at the last step."""

    def __init__(self, *, total_steps: int, first_step: int, every: int, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._every = every
        self._stream = stream or sys.stderr
        self.rewind(first_step)

    def rewind(self, step: int) -> None:
        self._first_step, self._started = step, time.monotonic()  # whose speed the time left is of

    def log(self, point: Point) -> None:
        if LOSS not in point.metrics:
            self.message(_details(point))
        elif point.step % self._every == 0 or point.step >= self._total_steps:
            seconds, steps_left = time.monotonic() - self._started, max(0, self._total_steps - point.step)
            eta = time_left(seconds, max(1, point.step - self._first_step), steps_left)
            step = f"step {point.step:>{len(str(self._total_steps))}}/{self._total_steps}"
            self.message("  ".join([step, *_measures(point.metrics), f"eta {eta}"]))

    def message(self, text: str) -> None:
        print(colour_first_word(text, self._stream), file=self._stream, flush=True)


def progress_sink(*, total_steps: int, first_step: int, every: int) -> Sink:
    """Return a progress bar if stderr is a terminal, else a sink of lines."""
    if sys.stderr.isatty():
        return ProgressBar(total_steps=total_steps, first_step=first_step)
    return ProgressLines(total_steps=total_steps, first_step=first_step, every=every)

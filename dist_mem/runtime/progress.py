"""How far a command is: a bar on a terminal, and lines in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO, TypeVar

from dist_mem.runtime.extras import is_installed
from dist_mem.runtime.terminal import BarStream, make_printable

if TYPE_CHECKING:
    from tqdm import tqdm

ItemT = TypeVar("ItemT")
LINE_SECONDS = 30.0  # between the lines of `Progress`


def time_left(seconds: float, done: float, left: float) -> timedelta:
    """Return the time for the remaining work if `done` has taken `seconds`; in whole seconds."""
    return timedelta(seconds=math.ceil(seconds / done * left))


def show_count(items: Iterable[ItemT], what: str, *, unit: str, total: int | None = None) -> Iterator[ItemT]:
    """Yield the items, and show how many have been yielded."""
    with Progress(total, what, unit=unit) as progress:
        for item in items:
            yield item
            progress.add(1)


class Progress:
    """Progress of an amount of work, on stderr: a bar on a terminal, else a line every LINE_SECONDS.

    A terminal gets lines too if tqdm is not installed.

    with Progress(num_tokens, "scoring test") as progress:
        progress.add(num_read)
    """

    def __init__(
        self,
        total: int | None,
        what: str,
        *,
        unit: str = "tokens",
        shown: bool = True,
        share: float = 1.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total: of the work; None: nobody knows.
            shown: True on one rank only.
            share: of the work done by this rank; the other ranks are assumed to have made the same progress.
        """
        self._total, self._what, self._unit, self._share = total, what, unit, share
        self._stream = stream or sys.stderr
        self._shown = shown
        self._done = 0.0
        self._clock = clock
        self._started = self._last_line = clock()
        self._bar: tqdm | None = None
        if shown and self._stream.isatty() and is_installed("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                desc=make_printable(what),
                unit=f" {unit}",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,  # the results are printed instead
                file=BarStream(self._stream),
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, amount: int) -> None:
        """Add work that this rank has done."""
        if not self._shown:
            return
        added = amount / self._share
        self._done += added
        if self._bar is not None:
            self._bar.update(added)
        elif (now := self._clock()) - self._last_line >= LINE_SECONDS and self._done:
            self._last_line = now
            print(self._line(now - self._started), file=self._stream, flush=True)

    def _line(self, seconds: float) -> str:
        rate = f"{self._done / seconds:,.1f} {self._unit}/s"
        if self._total is None:
            return f"{self._what}: {self._done:,.0f} {self._unit}  {rate}"
        left = time_left(seconds, self._done, max(0.0, self._total - self._done))
        return f"{self._what}: {self._done:,.0f} of {self._total:,} {self._unit}  {rate}  eta {left}"

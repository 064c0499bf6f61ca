"""Collect Python's garbage on all ranks at the same step.

Python collects when a process has created enough objects, so each rank at another step; meanwhile all others wait for
it in the next collective, and a full collection visits every object of the modules that are loaded. Here the objects
of the start are left out for good (`gc.freeze`), and each rank collects after the same steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def agree_on_collections(every: int | None) -> Iterator[Callable[[int], None]]:
    """Provide a function to call after each step, which collects at multiples of `every`.

    Its first call freezes what exists and turns automatic collection off, until the context ends.

    Args:
        every: steps; None: the function does nothing.
    """
    was_on, is_frozen = gc.isenabled(), False

    def after_step(step: int) -> None:
        nonlocal is_frozen
        if every is None:
            return
        if not is_frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            is_frozen = True
        elif step % every == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        if is_frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()

"""Stop an evaluation early: all ranks leave it before the same forward, about a second after the reason arises.

An evaluation writes its files after its last forward, so a stop leaves no incomplete file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dist_mem.errors import CutShortError
from dist_mem.runtime.distributed import World, sum_over_ranks

LOOK_SECONDS = 1.0  # between two agreements, about: one per forward would keep a GPU waiting for the host

StopCheck = Callable[..., None]  # called before every forward, possibly as a forward hook; raises CutShortError


def stop_check(is_stopping: Callable[[], bool], world: World) -> StopCheck:
    """Return a check that raises CutShortError on every rank, before the same forward, once any rank `is_stopping`.

    All ranks run the same number of forwards. The number between two agreements follows from the time summed over all
    ranks, so it is the same on every rank.
    """
    every = left = 1
    last = time.monotonic()

    def agree() -> int:
        nonlocal last
        now = time.monotonic()
        num_stopping, seconds = sum_over_ranks([float(is_stopping()), now - last], world.device)
        last = now
        if num_stopping:
            raise CutShortError
        pace = seconds / world.size / LOOK_SECONDS
        return every * 2 if pace < 0.5 else max(1, every // 2) if pace > 1 else every

    def check(*_: Any) -> None:
        nonlocal every, left
        left -= 1
        if left == 0:
            every = left = agree()

    return check

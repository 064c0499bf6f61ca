"""What of torch belongs to the whole process, and a library call gives back as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Compute with this number of CPU threads of torch; None: as many as before."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def drawing(seed: int | None = None) -> Iterator[None]:
    """Draw from torch's random numbers on the CPU, from `seed` on if it is given, and give them back as they were."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield

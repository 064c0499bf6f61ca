"""Keep an error of one rank until all ranks can stop for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dist_mem.runtime.distributed import REPORTED, agree_all_well


class LocalFailure:
    """The first error of this rank alone: its data cannot be read, or rank 0 cannot record.

    A rank that raised it at once would leave the others waiting in a collective. So it is kept, it stops all ranks
    after the current step, and all raise it once that step is saved.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @property
    def is_set(self) -> bool:
        return self._error is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """End the block, which is no collective, at an error; keep the error if it is the first."""
        try:
            yield
        except REPORTED as error:
            self._error = self._error or error

    def raise_on_all_ranks(self) -> None:
        """Raise a RunError on every rank if any rank has kept an error; collective."""
        agree_all_well(self._error, "training")

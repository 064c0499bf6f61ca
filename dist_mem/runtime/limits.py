"""Limits of this process that the system lets it raise: how many files and processes it may have."""

from __future__ import annotations

import resource
from typing import NamedTuple

GOOD_OPEN_FILES = 4096  # the usual limit for training; a rank of a large job needs hundreds
_BASE_FILES, _FILES_PER_PEER = 200, 4  # libraries and shards; the groups of gloo or NCCL have sockets to every rank


class OpenFiles(NamedTuple):
    """How many files a process may have open, and how many a rank needs."""

    allowed: int
    needed: int


def raise_open_files(num_ranks: int) -> OpenFiles:
    """Raise the soft limit of open files to what a rank needs, as far as the hard limit allows."""
    needed = _BASE_FILES + _FILES_PER_PEER * num_ranks
    return OpenFiles(raise_limit(resource.RLIMIT_NOFILE, max(GOOD_OPEN_FILES, needed)), needed)


def raise_limit(kind: int, good: int) -> int:
    """Raise a soft limit up to `good` as far as the hard limit allows, and return it."""
    soft, hard = resource.getrlimit(kind)
    soft, hard = (2**31 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft < good and soft < hard:
        soft = min(good, hard)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    return soft

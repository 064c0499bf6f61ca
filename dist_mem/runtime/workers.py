"""Processes that share a list of work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from dist_mem.errors import UnfitError

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerKilledError(UnfitError):
    """A worker process ended without an error; the system kills the largest process if memory runs out."""


@contextmanager
def map_unordered(
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int
) -> Iterator[Iterator[Result]]:
    """Yield an iterator of the results of `function` in order of completion; with one worker, compute in this process.

    `function` and the items are sent to the workers: they must be picklable, and the main script importable.

    Raises:
        WorkerKilledError: inside the `with` block, where errors of `function` are raised too.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # forked workers would inherit the caller's threads
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        futures = [pool.submit(function, item) for item in items]
        yield (future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise WorkerKilledError(
            "a worker process was killed, perhaps for its memory: start the same command again with fewer workers; "
            "finished pieces are kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Exit when the builder dies, even if it is killed: the next builder must find no other process at work."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this function is for worker processes")

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder handles Ctrl-C
    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()

"""A function over many items in worker processes that never outlive the process that started them."""

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

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerKilledError(RuntimeError):
    """A worker process ended without a word; the system kills the largest process when memory runs out."""


@contextmanager
def map_unordered(
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int
) -> Iterator[Iterator[Result]]:
    """Results of `function` in the order in which they are finished; with one worker, in this process.

    `function` and the items are sent to the workers: they must be picklable, and the main script importable.

    Raises:
        WorkerKilledError: inside the `with` block; and there, whatever `function` raises.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # forked workers would inherit whatever threads the caller has
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
    """Let a worker die with its builder: a killed one cannot tell it, and the next one must find the place empty."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this function is for worker processes")

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the builder's to answer
    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()

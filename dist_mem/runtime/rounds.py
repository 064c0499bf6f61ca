"""Work of all ranks that may take longer than a collective waits: downloads, copies. The ranks meet from time to time.

Ranks that have finished wait for the others. With one collective at the end, their wait would be limited by its
timeout, and nobody would hear a signal or an error of another rank before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from dist_mem.errors import StoppedEarlyError
from dist_mem.runtime.distributed import REPORTED, agree_all_well, gather_objects
from dist_mem.runtime.signals import received_signal

ROUND_SECONDS = 5.0  # between two meetings

ResultT = TypeVar("ResultT")


def work_in_rounds(work: Callable[[], ResultT], what: str, *, cancel: Callable[[], None]) -> ResultT:
    """Return the result of `work`, which runs in a thread; every rank calls it before the first step.

    Args:
        what: named in the error that the ranks agree on.
        cancel: makes `work` raise soon; called if another rank has failed, or if any has received a signal.

    Raises:
        RunError: on every rank, as soon as `work` has failed on any; see `on_all_ranks`.
        StoppedEarlyError: on every rank, soon after a signal to any while one still works. Work that ends before the
            first meeting is no reason to stop: a job that is preempted at each start progresses by a step.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rounds") as pool:
        running = pool.submit(work)
        are_done = False
        try:
            while not are_done:
                wait([running], timeout=ROUND_SECONDS)
                is_done = running.done()  # read once: it may end during the agreement
                error = running.exception() if is_done else None
                if error is not None and not isinstance(error, REPORTED):
                    raise error
                states = gather_objects((is_done, received_signal()))
                are_done = all(is_done for is_done, _ in states)
                received = next((name for _, name in states if name is not None), None)
                if received and not are_done:
                    raise StoppedEarlyError(received)
                agree_all_well(error, what)
        except BaseException:
            cancel()  # else the end of the pool waits for the work
            raise
        return running.result()

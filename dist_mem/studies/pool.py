"""Run all runs of a table, several at a time; one that died is started again, and does not stop the others."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dist_mem.errors import EXIT_USAGE, UnusableError
from dist_mem.studies.job import CommandError, Job, Place, StoppedError
from dist_mem.studies.runs import Run

_PAUSE = 1.0  # seconds before another start
Step = Callable[[Run, Callable[[str], None], Place], None]  # what is done for a run, with a function that reports


def for_each_run(
    job: Job, runs: Sequence[Run], places: Sequence[Place], step: Step, *, restarts: int
) -> list[CommandError | UnusableError]:
    """Call `step` for every run, one at a time in each place, and return the errors of those that failed.

    Args:
        restarts: further starts of a run whose command died. Wrong input (exit code 2) is not started again.

    Raises:
        StoppedError: a signal was received, and all running commands have ended.
    """
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def attempt(number: int, item: Run) -> CommandError | UnusableError | None:
        def report(text: str) -> None:
            print(f"[{number}/{len(runs)}] {text}", flush=True)

        place = free.get()
        try:
            for left in range(restarts, -1, -1):
                if job.signal.received:
                    raise StoppedError
                try:
                    step(item, report, place)
                    return None
                except (CommandError, UnusableError) as error:
                    if left == 0 or isinstance(error, UnusableError) or error.code == EXIT_USAGE:
                        report(f"{item.name}: failed")
                        return error
                    report(f"{item.name}: ended with exit code {error.code}; it is started again")
                    time.sleep(_PAUSE)
            return None
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as threads:
        futures = [threads.submit(attempt, number, item) for number, item in enumerate(runs, start=1)]
    found = [future.result() for future in futures]  # a StoppedError is raised here, after all have ended
    return list({str(error): error for error in found if error is not None}.values())

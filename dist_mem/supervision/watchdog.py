"""The watchdog: if nothing moves in a job, it reports the position of every rank and ends. See docs/howto/trouble.md.

    the training marks its progress: beat("forward") -> a thread of every rank sees the marks stop
        -> RUN/hangs/<start>/rank-00003.txt, with all stacks -> the lowest live rank names the suspects in report.txt
        -> exit code 86

Since collectives hang, the ranks communicate through the run directory; the store of the process group also announces
that a watchdog has decided. From then on no other error decides the exit code: a rank whose connections break because
another rank ended for the hang also ends for the hang. Time is counted in ticks of the thread: a job that was
suspended as a whole, while all clocks ran on, has not hung.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_mem.errors import EXIT_HUNG
from dist_mem.runtime.distributed import World, gather_objects, has_note, leave_note
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.ranks import note_exit_code
from dist_mem.supervision import flight_recorder, timeline
from dist_mem.supervision.hang_report import (
    Position,
    gather_positions,
    gather_seconds,
    note_failed_nodes,
    refresh,
    report,
    slack,
    suspects,
    wait_for_report,
    write_position,
)

TICK = 0.5  # seconds
REPORT_SECONDS = 1.5  # for the report and MLflow, once the positions of all ranks are known
PATIENCE = 3.0  # times `watchdog.seconds`, in the phases of `_PATIENT` and until the first step is done
_PATIENT = frozenset({"opening", "restoring", "evaluating", "saving", "ending"})
# Least limits. DeepSpeed may compile, or wait for a job on the node that does; a rank whose blocks are compiled waits
# for one that has found none of them in its cache.
LEAST_SECONDS = {"opening": 180.0, "compiling": 1800.0}
HEAR_SECONDS = 2.0  # after which an idle rank asks whether another one has decided
UNWATCHED = "fetching data"  # has no limit: the fetch watches its transfer itself


def report_seconds(num_ranks: int) -> float:
    """Return the longest time from the decision of a watchdog to the end of its process, in seconds."""
    return gather_seconds(num_ranks) + slack(num_ranks) + REPORT_SECONDS


class _ProcessProgress:
    """The progress of the main thread. There is one per process, as there is one main thread."""

    beats = 0
    phase = "opening"
    step: int | None = None
    is_warm = False  # a whole step is done: everything is compiled and loaded
    before_end: Callable[[], None] | None = None
    watchdog: Watchdog | None = None


_progress = _ProcessProgress()


def beat(phase: str) -> None:
    """Mark that the main thread has reached `phase`; takes half a microsecond.

    All ranks call it at the same places in the same order, so a rank with fewer beats is behind.
    """
    _progress.beats += 1
    _progress.phase = phase
    timeline.enter(phase)


def begin_step(step: int) -> None:
    """Mark the beginning of a training step, which first reads the data of the next one."""
    _progress.is_warm = _progress.step is not None
    _progress.step = step
    beat("reading data")


def before_end(work: Callable[[], None] | None) -> None:
    """Set the work that the thread does before it ends a hanging process, if time allows: a report to MLflow."""
    _progress.before_end = work


def end_if_hung() -> None:
    """Call this after any error: it does not return if a watchdog has decided, as another rank's end caused it."""
    if _progress.watchdog is not None:
        _progress.watchdog.end_if_decided()


@contextmanager
def watch(run_dir: Path, world: World, seconds: float | None) -> Iterator[None]:
    """Watch this process during the block; every rank enters it.

    Args:
        seconds: longest time without progress; None: no watchdog.
    """
    if seconds is None:
        yield
        return
    watchdog = Watchdog(run_dir, world, seconds)
    try:
        yield
    except Exception:
        end_if_hung()
        raise
    finally:
        beat("ending")
        watchdog.close()
        _progress.watchdog = None


class Inquiry:
    """A question to a store or a file system that may never answer; until it has, the question is not put again."""

    def __init__(self, put: Callable[[], bool]) -> None:
        """`put` returns True for ever once it has."""
        self._put = put
        self._is_yes = False
        self._thread: threading.Thread | None = None

    def is_yes(self) -> bool:
        """Return whether the answer is yes; no if none comes within a tick, or the question fails."""
        if not self._is_yes:
            if self._thread is None or not self._thread.is_alive():
                self._thread = _in_background(self._listen, None)
            self._thread.join(TICK)
        return self._is_yes

    def _listen(self) -> None:
        self._is_yes = self._put()


class Watchdog:
    """The watchdog thread of one rank."""

    def __init__(self, run_dir: Path, world: World, seconds: float) -> None:
        gathered = gather_objects((node_name(), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())))
        self._nodes = [node for node, _ in gathered]  # also of ranks that will not report
        self._run_dir, self._world, self._seconds = run_dir, world, seconds
        self._folder = run_dir / "hangs" / gathered[0][1]
        self._note = f"dist_mem/hang/{gathered[0][1]}"
        self._slack = slack(world.size)
        self._idle = 0.0  # seconds without progress
        # Whether another watchdog has decided, by the store and by the run directory.
        self._store, self._folders = Inquiry(lambda: has_note(self._note)), Inquiry(self._others_have_reported)
        _progress.__dict__.clear()  # of an earlier job of this process
        _progress.watchdog = self
        self._lock = threading.Lock()
        self._is_closed = False
        self._ends = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Does not return if the thread is ending the process: other ranks still read from this one."""
        with self._lock:
            self._is_closed = not self._ends
        self._wake.set()
        self._thread.join()

    def end_if_decided(self) -> None:
        """End the process if any rank's watchdog has decided; else return within a second."""
        if not (self._store.is_yes() or self._folders.is_yes()):
            return
        with self._lock:
            is_first, self._ends = not self._ends, True
        if is_first:
            self._end()
        self._thread.join()

    def _watch(self) -> None:
        last_beats, last_time = -1, time.monotonic()
        while not self._wake.wait(TICK):
            now = time.monotonic()
            self._idle += min(now - last_time, 2 * TICK)  # more time passes only if this process is stopped
            last_time = now
            if _progress.beats != last_beats or _progress.phase == UNWATCHED:
                self._idle, last_beats = 0.0, _progress.beats
            elif self._has_hung(self._idle):
                with self._lock:
                    if self._is_closed or self._ends:
                        return
                    self._ends = True
                self._end()

    def _has_hung(self, idle: float) -> bool:
        """Return whether nothing has moved here for the limit, or for half of it while another rank reports a hang."""
        limit = self._seconds
        if _progress.phase in _PATIENT or not _progress.is_warm:
            limit *= PATIENCE
        limit = max(limit, LEAST_SECONDS.get(_progress.phase, 0.0))
        is_reported = idle >= HEAR_SECONDS and self._store.is_yes()  # early: rank 0, with the store, may end
        if idle >= limit / 2 and idle % max(TICK, self._slack) < TICK:
            is_reported = is_reported or self._folders.is_yes()
        return idle >= limit or (idle >= limit / 2 and is_reported)

    def _others_have_reported(self) -> bool:
        for folder in (self._run_dir, self._folder.parent):
            if folder.is_dir():
                refresh(folder, self._world.rank)
        return self._folder.exists()

    def _end(self) -> None:
        """Report, and end the process. Nothing may prevent its end, such as a dead file system."""
        call_with_timeout(lambda: leave_note(self._note), TICK)
        final_work = _in_background(_progress.before_end or (lambda: None), "the last report to the tracker")
        deadline = time.monotonic() + report_seconds(self._world.size)
        try:
            self._write_report(deadline)
        except Exception as error:  # of any type: the process ends
            print(f"watchdog: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            final_work.join(max(0.0, deadline - time.monotonic()))
            call_with_timeout(lambda: note_exit_code(EXIT_HUNG), TICK, "the exit code for the batch script")
            call_with_timeout(sys.stderr.flush, TICK)
            os._exit(EXIT_HUNG)

    def _write_report(self, deadline: float) -> None:
        rank, num_ranks = self._world.rank, self._world.size
        mine = Position(
            rank=rank,
            node=self._nodes[rank],
            pid=os.getpid(),
            step=_progress.step,
            phase=_progress.phase,
            beats=_progress.beats,
            idle=round(self._idle, 1),
        )
        # First the recorders: once positions are there, all is.
        call_with_timeout(lambda: flight_recorder.save(self._folder, rank), TICK, "the record of collectives")
        if not call_with_timeout(lambda: write_position(self._folder, mine), TICK * 2 + self._slack, "the position"):
            print(f"watchdog: {self._folder} cannot be written; the stacks of rank {rank}:", file=sys.stderr)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            time.sleep(3 * TICK)  # the others cannot read the file: wait until each has checked the store
        gather_limit = gather_seconds(num_ranks) + self._slack + TICK
        positions = call_with_timeout(
            lambda: gather_positions(self._folder, rank=rank, num_ranks=num_ranks), gather_limit
        )
        if positions is None or positions:  # None: the folder does not answer
            known, is_read = positions or [mine], positions is not None
            limit, what = REPORT_SECONDS + self._slack, "the records of all ranks"
            recorded = call_with_timeout(lambda: flight_recorder.read_verdict(self._folder), limit, what)
            recorded = recorded or flight_recorder.NO_VERDICT
            suspected = suspects(known, self._nodes, recorded, is_read=is_read)
            text = report(
                known,
                self._nodes,
                suspected,
                seconds=self._seconds,
                folder=self._folder,
                recorded=recorded.lines,
                is_read=is_read,
            )
            print(text, file=sys.stderr, flush=True)
            call_with_timeout(lambda: self._publish(text, suspected), TICK * 2, "the report")
        else:  # that rank reads from this process's connections: if this one ended first, it would fail
            left = max(REPORT_SECONDS, deadline - time.monotonic())
            call_with_timeout(lambda: wait_for_report(self._folder, rank=rank, num_ranks=num_ranks, seconds=left), left)

    def _publish(self, text: str, suspected: Collection[int]) -> None:
        partial = self._folder / f"report.{self._world.rank}.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        note_failed_nodes(self._run_dir, dict.fromkeys(self._nodes[rank] for rank in suspected), self._nodes)
        partial.replace(self._folder / "report.txt")  # last: the others end once it exists


def _in_background(work: Callable[[], Any], what: str | None) -> threading.Thread:
    """Start `work`; its error is printed with `what`, unless that is None."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # of any type: the process ends in any case
            if what is not None:
                print(f"watchdog: {what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, name="watchdog-helper", daemon=True)
    thread.start()
    return thread


def call_with_timeout(work: Callable[[], Any], seconds: float, what: str | None = None) -> Any:
    """Return the result of `work`; None if it fails or takes longer: it may use a file system that does not answer.

    Args:
        what: the subject, to print why there is no result; None: that is expected, as when another rank has ended.
    """
    result: list[Any] = []
    helper = _in_background(lambda: result.append(work()), what)
    helper.join(seconds)
    if helper.is_alive() and what is not None:
        print(f"watchdog: {what}: not done in {seconds:g} s", file=sys.stderr, flush=True)
    return result[0] if result else None

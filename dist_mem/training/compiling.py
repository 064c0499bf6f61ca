"""The parts of a start that compile, and the end of a start by Ctrl-C, which also reaches compilers."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dist_mem.block import any_compiled, compile_blocks_of
from dist_mem.config import TrainConfig
from dist_mem.engine.compiling import compile_blocks
from dist_mem.engine.cpu_op import drop_buffer_name
from dist_mem.engine.engine import Engine
from dist_mem.engine.start import start_communication
from dist_mem.errors import RunError, StoppedEarlyError
from dist_mem.nn.compilation import report_each_graph
from dist_mem.runtime.distributed import World, announce, from_rank0, gather_objects, has_note, leave_note, on_all_ranks
from dist_mem.runtime.signals import StopSignal
from dist_mem.supervision.watchdog import beat

# The table of docs/howto/performance.md: from the best to the worst case in fp32 and bf16, and from an empty cache.
_ON_CPUS = "on CPUs, compiled blocks took 0.88 to 0.99 of the time of an update, and 89 to 646 s to compile once"
_ON_GPUS = "on one H100, an update of Gated DeltaNet took less than half of the time; others were not measured"

ResultT = TypeVar("ResultT")

_LOOK_SECONDS = 1.0
_SHORT_SECONDS = 5.0


def leave_if_interrupted(stop_signal: StopSignal, *, by_any: bool = False) -> None:
    """End the start, between two of its parts, if Ctrl-C was pressed; collective.

    Signals of schedulers take effect after the first step, so that a job that is preempted at each start progresses.

    Args:
        by_any: end it after any signal, because this part of the start has failed and the signal is the reason.

    Raises:
        StoppedEarlyError: on every rank.
    """
    received = [name for name in gather_objects(stop_signal.received) if name and (by_any or name == "SIGINT")]
    if received:
        raise StoppedEarlyError(received[0])


def open_communication(world: World, stop_signal: StopSignal) -> None:
    """Start DeepSpeed's communication, whose op may have to be compiled; collective."""
    _run_compilers(partial(start_communication, _check(stop_signal)), "starting DeepSpeed", stop_signal)
    drop_buffer_name(world.rank)


def _check(stop_signal: StopSignal) -> Callable[[], None]:
    """Return a check that raises StoppedEarlyError after a signal to any rank, for which it looks once a second.

    Collective. A short wait, as for the ranks that load the op before, goes on to the first step, as after any signal.
    """
    note = from_rank0(f"dist_mem/stopped/{secrets.token_hex(8)}")
    looked = [-_LOOK_SECONDS]
    began = [math.inf]

    def check() -> None:
        began[0] = min(began[0], time.monotonic())
        if time.monotonic() < began[0] + _SHORT_SECONDS:
            return
        if stop_signal.received is not None:
            leave_note(note)
            stop_signal.check()
        if time.monotonic() > looked[0] + _LOOK_SECONDS:
            looked[0] = time.monotonic()
            if has_note(note):
                raise StoppedEarlyError("a signal to another rank")

    return check


def compile_model(train: TrainConfig, engine: Engine, stop_signal: StopSignal) -> list[str]:
    """Compile the blocks that `train.compile` selects, and return messages; collective.

    Where `train.compile` leaves the choice to the device, blocks that the compiler refuses run as they are written, on
    every rank. Where it is true, that ends the start.
    """
    if not any_compiled(engine.module):
        return []
    began = time.perf_counter()
    beat("compiling")
    report_each_graph(_beat)
    with announce("compiling the blocks: up to minutes; the next start on this machine takes the code from its cache"):
        work = partial(compile_blocks, engine, train)
        refused = _run_compilers(
            work if train.compile else partial(_refusal, work), "compiling the blocks", stop_signal
        )
    beat("opening")
    if reason := next(filter(None, gather_objects(refused)), None):
        compile_blocks_of(engine.module, False)
        return [f"the blocks run without torch.compile: {reason}"]
    return [describe_compilation(time.perf_counter() - began, engine.device.type)]


def _refusal(work: Callable[[], None]) -> str | None:
    """Return why the compiler refuses the blocks, or None."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return None


def _beat() -> None:
    beat("compiling")


def describe_compilation(seconds: float, device_type: str) -> str:
    """Return how long the blocks took to compile, and what they gain on this device, as far as it was measured."""
    gain = _ON_CPUS if device_type == "cpu" else _ON_GPUS
    return f"compiled the blocks in {seconds:.0f} s; {gain}: docs/howto/performance.md"


def _run_compilers(work: Callable[[], ResultT], what: str, stop_signal: StopSignal) -> ResultT:
    """Return the result of `work` on all ranks. It may fail because Ctrl-C in a terminal also reaches the compiler."""
    try:
        result = on_all_ranks(work, what)
    except RunError:
        leave_if_interrupted(stop_signal, by_any=True)
        raise
    leave_if_interrupted(stop_signal)
    return result

"""Start the ranks of a command on this machine, and end them together. Rank 0 prints; others are heard if they fail."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from dist_mem.errors import UnfitError
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.processes import dist_mem
from dist_mem.runtime.ranks import environment_of_rank
from dist_mem.runtime.signals import StopSignal

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 15.0  # that other ranks get to end by themselves once one has failed
_LAST_LINES = 5


def run_ranks(arguments: Sequence[str], ranks: int, *, device: str, early: StopSignal | None = None) -> int:
    """Run `dist-mem ARGUMENTS` on this many ranks; return rank 0's exit code.

    Args:
        device: "cpu" hides GPUs from the ranks.
        early: the handler of signals to this process, which are passed on to the ranks.

    Raises:
        UnfitError: a rank was killed, or ended in another way than rank 0.
    """
    on_cpus = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    command, port = dist_mem(*arguments), free_port()
    processes, codes = list[subprocess.Popen[bytes]](), list[int | None]()
    with ExitStack() as opened:
        outputs = [None, *(opened.enter_context(tempfile.TemporaryFile()) for _ in range(ranks - 1))]
        try:
            for rank, output in enumerate(outputs):
                environment = environment_of_rank(rank, ranks, port, on_cpus)
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            codes = _wait(processes, early)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code is None or code < 0 or code != codes[0]:
                text = f"rank {rank} of {ranks} ended with {code}, rank 0 with {codes[0]}"
                raise UnfitError(f"{text}. {_end(outputs[rank])}")
    return int(codes[0] or 0)


def _wait(processes: Sequence[subprocess.Popen[bytes]], early: StopSignal | None) -> list[int | None]:
    """Return the exit codes; None for a rank that does not end although another one has failed."""
    deadline, is_stopped = float("inf"), False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if early is not None and early.received and not is_stopped:
            is_stopped = True
            for process in processes:
                process.terminate()
        time.sleep(_POLL_SECONDS)
    return [process.returncode for process in processes]


def _end(output: IO[bytes] | None) -> str:
    """Return the last lines that a rank printed."""
    if output is None:
        return "Its output is above"
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").splitlines()
    return "It printed: " + " | ".join(lines[-_LAST_LINES:])

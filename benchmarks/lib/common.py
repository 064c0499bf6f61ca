"""Functions that several benchmarks share: arguments, interleaved rounds and jobs of several ranks."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_mem.runtime.network_interface import free_port

ROOT = Path(__file__).parent.parent.parent


def arguments_of(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with one option per whole number, for example `--seg-len` for `seg_len`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="default: %(default)s")
    return parser


def options_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate options from keys of a configuration, `train.steps=4`, which may stand anywhere between them."""
    is_key = [bool(re.match(r"[a-z_]+(\.\w+)*=", argument)) for argument in arguments]
    pairs = list(zip(arguments, is_key, strict=True))
    return [text for text, key in pairs if not key], [text for text, key in pairs if key]


def load() -> str:
    """Return the number of cores and the load of this machine."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def resident(key: str) -> int:
    """Return a line of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def seconds(function: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def interleaved(
    calls: dict[Any, Callable[[], Any]], rounds: int, clock: Callable[[Callable[[], Any]], float] = seconds
) -> dict[Any, list[float]]:
    """Return the seconds of every call in every round; a busy moment of the machine affects all calls alike."""
    times: dict[Any, list[float]] = {case: [] for case in calls}
    for _ in range(rounds):
        for case, call in calls.items():
            times[case].append(clock(call))
    return times


def start_ranks(command: list[str], num_ranks: int) -> list[subprocess.Popen[str]]:
    """Start the command as every rank of one job, with a launcher's variables if there are several ranks.

    Only the output of rank 0 can be read.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(num_ranks):
        ranks = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        launched = place | {name: str(value) for name, value in ranks.items()}
        environment = os.environ | (launched if num_ranks > 1 else {})
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True))
    return processes


def output_of_rank0(processes: list[subprocess.Popen[str]]) -> str:
    """Wait for a job and return the output of rank 0. Exit with its errors if it failed."""
    outputs = [process.communicate() for process in processes]
    if processes[0].returncode != 0:
        sys.exit(f"the job failed:\n{outputs[0][1]}")
    return outputs[0][0]

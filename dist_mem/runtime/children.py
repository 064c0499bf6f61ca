"""Child processes on this machine: `dist-mem` on one or several ranks, started, watched and ended with this process."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from dist_mem.errors import UnfitError
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.processes import dist_mem, python_module
from dist_mem.runtime.ranks import environment_of_rank, visible_devices
from dist_mem.runtime.signals import StopSignal

_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 15.0  # that other ranks get to end by themselves once one has failed
_LAST_LINES = 5


def launcher(ranks: int, devices: str | None = None) -> list[str]:
    """Return the command that starts `dist_mem` on this machine, through DeepSpeed's launcher for several ranks.

    It uses the part of the launcher that starts the ranks. The other part (`deepspeed`) does not forward signals and
    would leave the ranks running. That part numbers the GPUs from 0; `env` gives the ranks those that the user chose.

    Args:
        devices: CUDA_VISIBLE_DEVICES of the command; None: that of this process.
    """
    if ranks == 1:
        return dist_mem()
    devices = visible_devices() if devices is None else devices
    program = ["env", *(["-u", "CUDA_VISIBLE_DEVICES"] if devices is None else [f"CUDA_VISIBLE_DEVICES={devices}"])]
    world = base64.urlsafe_b64encode(json_text({"localhost": list(range(ranks))}).encode()).decode()
    place = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]  # a free port: several tables may run here
    options = [f"--world_info={world}", "--node_rank=0", *place, "--log_level=error", "--no_local_rank"]
    return python_module("deepspeed.launcher.launch", *options, "--no_python", *program, *dist_mem())


def die_with_parent(arguments: Sequence[str]) -> list[str]:
    """Return a command that receives SIGTERM, on which training saves, when this process dies, even by `kill -9`.

    setpriv (util-linux 2.33) requests this from the kernel and then executes the command. Without setpriv only signals
    are forwarded.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return list(arguments)
    prefix = [setpriv, "--pdeathsig", "TERM", "--"]
    # The setpriv of RHEL 8 and busybox do not have the option.
    if subprocess.run([*prefix, setpriv, "--version"], capture_output=True).returncode != 0:
        return list(arguments)
    return [*prefix, *arguments]


def start(
    arguments: Sequence[str], output: IO[bytes] | int | None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, in a process group of its own.

    Ctrl-C and a closed terminal would end a launcher before its ranks have saved.

    Args:
        output: gets what the command prints to stdout and stderr; None: those of this process.
        environment: None: that of this process.
    """
    errors = None if output is None else subprocess.STDOUT
    return subprocess.Popen(die_with_parent(arguments), stdout=output, stderr=errors, env=environment, process_group=0)


def watch(
    processes: Sequence[subprocess.Popen[bytes]], is_stopping: Callable[[], bool], *, grace: float = float("inf")
) -> list[int | None]:
    """Wait until all end; return their exit codes, None for one that does not end although another one has failed.

    Args:
        is_stopping: called twice a second; once it returns True, all get SIGTERM.
        grace: seconds that the others get to end by themselves once one has failed.
    """
    deadline, is_stopped = float("inf"), False
    while (running := [one for one in processes if one.poll() is None]) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + grace)
        if not is_stopped and is_stopping():
            is_stopped = True
            for process in running:
                process.terminate()  # only once: each signal interrupts a launcher
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=_LOOK_SECONDS)
    return [process.returncode for process in processes]


def run_ranks(arguments: Sequence[str], ranks: int, *, device: str, early: StopSignal | None = None) -> int:
    """Run `dist-mem ARGUMENTS` on this many ranks; return rank 0's exit code.

    Rank 0 prints; the others are heard if they fail.

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
                processes.append(start(command, output, environment_of_rank(rank, ranks, port, on_cpus)))
            codes = watch(processes, lambda: bool(early and early.received), grace=_GRACE_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code is None or code < 0 or code != codes[0]:
                text = f"rank {rank} of {ranks} ended with {code}, rank 0 with {codes[0]}"
                raise UnfitError(f"{text}. {_end(outputs[rank])}")
    return int(codes[0] or 0)


def _end(output: IO[bytes] | None) -> str:
    """Return the last lines that a rank printed."""
    if output is None:
        return "Its output is above"
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").splitlines()
    return "It printed: " + " | ".join(lines[-_LAST_LINES:])

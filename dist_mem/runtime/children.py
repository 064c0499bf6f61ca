"""Child processes on this machine: `dist-mem` on one or several ranks, started, watched and ended with this process."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from dist_mem.runtime.figures import json_text
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.processes import dist_mem, python_module
from dist_mem.runtime.ranks import visible_devices

_LOOK_SECONDS = 0.5


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


def watch(process: subprocess.Popen[bytes], is_stopping: Callable[[], bool]) -> int:
    """Wait until a command ends, and return its exit code; it gets SIGTERM if this process is interrupted.

    Args:
        is_stopping: called twice a second; once it returns True, the command gets SIGTERM.
    """
    is_stopped = False
    try:
        while process.poll() is None:
            if not is_stopped and is_stopping():
                is_stopped = True
                process.terminate()  # only once: each signal interrupts a launcher
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_LOOK_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return process.returncode

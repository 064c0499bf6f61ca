"""What the cases of gpu_cases.py share: processes that have imported before they are needed, limits, and waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lib.common import ROOT

from dist_mem.runtime.network_interface import free_port

_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "Cannot allocate", "this needs ")  # the last: our own


class TimeUpError(Exception):
    """The time of this call is up; the case is made by the next one."""


class FailedError(Exception):
    """A case ended otherwise than it should."""

    def __init__(self, status: str, output: str) -> None:
        super().__init__(status)
        self.status, self.output = status, output


class Settings(NamedTuple):
    """How all cases are made."""

    out: Path
    is_cpu: bool
    is_tiny: bool
    deadline: float  # of time.monotonic()


class Bench:
    """Starts and ends the processes of the cases, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.out = settings.out
        self._limit = settings.deadline  # of the case
        self._standby: subprocess.Popen[str] | None = None
        self._running: list[subprocess.Popen[Any]] = []

    @property
    def device(self) -> str:
        return "cpu" if self.settings.is_cpu else "cuda"

    def begin(self, seconds: float) -> None:
        """Begin a case that may take this long."""
        self._limit = time.monotonic() + seconds

    def worker(self, work: dict[str, Any]) -> subprocess.Popen[str]:
        """Give work to the process that stands by, and start the next one."""
        worker, self._standby = self._standby or self._new_worker(), None
        self._give(worker, work)
        self.stand_by()
        return worker

    def _give(self, worker: subprocess.Popen[str], work: dict[str, Any]) -> subprocess.Popen[str]:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(work) + "\n")
        worker.stdin.flush()
        self._running.append(worker)
        return worker

    def stand_by(self) -> None:
        """Start a process that imports what the next case needs."""
        self._standby = self._standby or self._new_worker()

    def _new_worker(self, place: dict[str, str] | None = None) -> subprocess.Popen[str]:
        with (self.out / "workers.txt").open("a") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "lib.gpu_worker"],
                env={**os.environ, **(place or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def command(self, arguments: list[str], output: Path) -> subprocess.Popen[str]:
        """Start `dist-mem ARGUMENTS` in the process that stands by."""
        output.parent.mkdir(parents=True, exist_ok=True)
        return self.worker({"arguments": arguments, "output": str(output)})

    def ranks(self, arguments: list[str], output: Path) -> list[subprocess.Popen[str]]:
        """Start `dist-mem ARGUMENTS` as two ranks that share the device, joined by gloo; rank 0 writes the output."""
        output.parent.mkdir(parents=True, exist_ok=True)
        port, started = free_port(), []
        for rank in range(2):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
            place |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            worker = self._new_worker({name: str(value) for name, value in place.items()})
            file = output if rank == 0 else output.with_suffix(f".rank{rank}.txt")
            started.append(self._give(worker, {"arguments": arguments, "output": str(file), "over_gloo": True}))
        return started

    def on_cpu(self, arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
        """Start `dist-mem ARGUMENTS` in a process that sees no GPU."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        with output.open("a") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "dist_mem", *arguments],
                env=environment,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def wait(self, process: subprocess.Popen[Any], output: Path, until: Callable[[], bool] | None = None) -> None:
        """Wait until a command has ended with 0, or until something is true while it runs.

        Raises:
            FailedError: it ended otherwise, or its case took longer than its limit.
            TimeUpError: the time of this call is up.
        """
        while not (until is not None and until()):
            code = process.poll()
            if code == 0 and until is None:
                return
            if code is not None:
                text = output.read_text(errors="replace")
                is_full = any(sign in text for sign in _OUT_OF_MEMORY)
                status = "out of memory" if is_full else "refused" if code == 2 else f"ended with {code}"
                raise FailedError(status, text[-1500:])
            self.check_time()
            time.sleep(0.05)

    def check_time(self) -> None:
        """Raise TimeUpError or FailedError if a limit has passed."""
        if time.monotonic() > self.settings.deadline:
            raise TimeUpError
        if time.monotonic() > self._limit:
            raise FailedError("too slow", "")

    def run(self, arguments: list[str], output: Path) -> None:
        """Run a command to its end. Raises as `wait` does."""
        self.wait(self.command(arguments, output), output)

    def kill(self) -> None:
        """End the processes of the case at once; a model that nobody wants is not saved."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []

    def close(self) -> None:
        """End all processes."""
        self.kill()
        if self._standby is not None:
            self._running, self._standby = [self._standby], None
            self.kill()


def build_words(folder: Path, num_words: int, num_tokens: int) -> list[str]:
    """Return the command that makes random words."""
    make = f"from lib.random_words import build_random_words as b; from pathlib import Path; b(Path({str(folder)!r}), "
    return [sys.executable, "-c", f"{make}num_words={num_words}, num_tokens={num_tokens})"]


def configuration_file(size: str) -> Path:
    """Return the file of a size in configs/speed."""
    return ROOT / "configs" / "speed" / f"{size}.yaml"

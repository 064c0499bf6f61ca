"""Ranks that tests may kill at any time, forked from a process that has already imported everything.

The ranks of a pool must survive, and `dist-mem train` takes long to start; a job of forked ranks takes one or two
seconds.
"""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dist_mem.runtime.network_interface import free_port
from tests.support.fork_server import fork_server
from tests.support.limits import limit
from tests.support.ranks import launcher_environment

SIGKILLED = -9  # as an exit code


class Ended(NamedTuple):
    """Result of a job of forked ranks."""

    codes: list[int]  # exit code of each rank; negative: the signal that killed it
    texts: list[str]  # what each rank printed


class Ranks:
    """The processes of one job, running `function(*arguments[rank])`, which returns the exit code.

    Args:
        folder: where the output of the ranks is stored.
    """

    def __init__(self, function: Callable[..., int], arguments: Sequence[Sequence[Any]], *, folder: Path) -> None:
        size, port = len(arguments), free_port()
        self._logs = [folder / f"rank-{rank}.log" for rank in range(size)]
        self.processes = [
            fork_server().Process(target=_serve, args=(function, own, rank, size, port, log), daemon=True)
            for rank, (own, log) in enumerate(zip(arguments, self._logs, strict=True))
        ]
        for process, log in zip(self.processes, self._logs, strict=True):
            log.touch()  # a rank may die before it prints
            process.start()

    def finish(self, *, patience: float = 5.0, timeout: float = 120.0) -> Ended:
        """Wait for the end of the job and return its result.

        Args:
            patience: seconds from the first failure until the remaining ranks are killed, as launchers do.
        """
        deadline = time.monotonic() + limit(timeout)
        for process in self.processes:
            while process.is_alive():
                if any(other.exitcode for other in self.processes):
                    deadline = min(deadline, time.monotonic() + patience)
                process.join(0.05)
                if time.monotonic() > deadline:
                    process.kill()
        codes = [process.exitcode for process in self.processes]
        return Ended(codes, [log.read_text(encoding="utf-8") for log in self._logs])


def run_forked(function: Callable[..., int], arguments: Sequence[Sequence[Any]], *, folder: Path) -> Ended:
    """Start a job of forked ranks, and wait for its end."""
    return Ranks(function, arguments, folder=folder).finish()


class Program:
    """A running `dist-mem` in a forked process, with the interface of subprocess.Popen as far as tests use it."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> None:
        """Start `dist-mem ARGUMENTS`."""
        self._log = os.memfd_create("dist-mem.log")
        weakref.finalize(self, os.close, self._log)
        log = f"/proc/{os.getpid()}/fd/{self._log}"
        given = (list(arguments), str(cwd), dict(environment), log)
        self._process = fork_server().Process(target=_run_program, args=given, daemon=True)
        self._process.start()  # in milliseconds: everything is imported
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; negative: the signal that killed it; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return `returncode`."""
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, *, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; return its standard output and error in one text."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("dist-mem", timeout or 0.0, output=self._printed())
        return self._printed().decode(), None

    def _printed(self) -> bytes:
        return os.pread(self._log, os.fstat(self._log).st_size, 0)


def _run_program(arguments: list[str], cwd: str, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _redirect(Path(log))
    from dist_mem.__main__ import main

    _end(main, arguments)


def _serve(function: Callable[..., int], arguments: Sequence[Any], rank: int, size: int, port: int, log: Path) -> None:
    _redirect(log)
    os.environ.update(launcher_environment(rank, size, port))
    _end(function, *arguments)


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _end(function: Callable[..., int], *arguments: Any) -> NoReturn:
    try:
        code = function(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Run commands of a warm `dist-mem` (warm_programs.py) in empty folders; return exit codes, output and files."""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit
from tests.support.ranks import launcher_environment
from tests.support.warm_programs import running_server

_ADDRESS_SPACE = 16 << 30  # bytes: a larger allocation fails instead of taking the machine down


class Answer(NamedTuple):
    """Result of a command."""

    code: int  # exit code; negative: the signal that killed it
    text: str  # standard output and standard error
    left: list[str]  # files and folders that it created
    seconds: float


class Asked:
    """Runs commands one after another.

    Args:
        address: socket of the server.  folder: parent of the empty folders.
    """

    def __init__(self, address: Path, folder: Path) -> None:
        self._address = address
        self._folder = folder

    def __call__(self, arguments: Sequence[str], *, timeout: float = 60.0, **environment: str) -> Answer:
        """Run `dist-mem ARGUMENTS` and return its result. Raise TimeoutError if it does not end in time."""
        here = Path(tempfile.mkdtemp(dir=self._folder))
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = self._ask(arguments, here, output.fileno(), timeout, environment)
            output.seek(0)
            text = output.read().decode(errors="replace")
        left = sorted(str(path.relative_to(here)) for path in here.rglob("*"))
        return Answer(code, text, left, time.monotonic() - began)

    def _ask(
        self, arguments: Sequence[str], here: Path, output: int, timeout: float, environment: Mapping[str, str]
    ) -> int:
        variables = {**os.environ, **launcher_environment(0, 1, free_port()), "OMP_NUM_THREADS": "1", **environment}
        variables["WARM_PROGRAMS"] = str(self._folder)
        with Path(os.devnull).open() as nothing, socket.socket(socket.AF_UNIX) as server:
            server.settimeout(limit(timeout))
            server.connect(str(self._address))
            socket.send_fds(server, [b"+"], [nothing.fileno(), output, output])
            request = {"arguments": list(arguments), "folder": str(here), "environment": variables}
            server.sendall(json.dumps(request).encode() + b"\n")
            answers = server.makefile()
            answers.readline()  # number of the process
            return int(answers.readline() or 1)


@contextmanager
def running_programs(folder: Path) -> Iterator[Asked]:
    """Provide `dist-mem` within the context; a command cannot allocate more than 16 GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, before[1]))
    try:
        with running_server(folder) as address:
            resource.setrlimit(resource.RLIMIT_AS, before)
            yield Asked(address, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

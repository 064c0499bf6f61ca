"""A warm `dist-mem` (warm_programs.py), whose commands run in empty folders."""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dist_mem.runtime.network_interface import free_port
from tests.support.asked import Answer, Asked
from tests.support.limits import limit
from tests.support.ranks import launcher_environment
from tests.support.warm_programs import running_server

ADDRESS_SPACE = 16 << 30  # bytes: a larger allocation fails instead of taking the machine down


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Runs `dist-mem ARGUMENTS`, which cannot allocate more than 16 GiB."""
    folder, before = tmp_path_factory.mktemp("asked"), resource.getrlimit(resource.RLIMIT_AS)

    def ask(arguments: Sequence[str]) -> Answer:
        here = Path(tempfile.mkdtemp(dir=folder))
        variables = {**os.environ, **launcher_environment(0, 1, free_port())}
        variables["WARM_PROGRAMS"] = str(folder)
        request = {"arguments": list(arguments), "folder": str(here), "environment": variables}
        with (
            tempfile.TemporaryFile() as output,
            Path(os.devnull).open() as nothing,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.settimeout(limit(180))
            server.connect(str(address))
            socket.send_fds(server, [b"+"], [nothing.fileno(), output.fileno(), output.fileno()])
            server.sendall(json.dumps(request).encode() + b"\n")
            answers = server.makefile()
            answers.readline()  # number of the process
            code = int(answers.readline() or 1)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Answer(code, text, sorted(str(path.relative_to(here)) for path in here.rglob("*")))

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, before[1]))
    try:
        with running_server(folder) as address:
            resource.setrlimit(resource.RLIMIT_AS, before)
            yield ask
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

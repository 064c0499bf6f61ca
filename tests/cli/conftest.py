"""A warm `dist-mem` (warm_programs.py), whose commands run in empty folders."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit
from tests.support.ranks import launcher_environment
from tests.support.warm_programs import Answer, Asked, running_server, write_programs

ADDRESS_SPACE = 16 << 30  # bytes: a larger allocation fails instead of taking the machine down


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Runs `dist-mem ARGUMENTS`, which cannot allocate more than 16 GiB."""
    folder, before = tmp_path_factory.mktemp("asked"), resource.getrlimit(resource.RLIMIT_AS)

    def ask(arguments: Sequence[str]) -> Answer:
        here = Path(tempfile.mkdtemp(dir=folder))
        done = subprocess.run(
            [str(folder / "dist-mem"), *arguments],
            cwd=here,
            env={**os.environ, **launcher_environment(0, 1, free_port()), "WARM_PROGRAMS": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit(180),
        )
        left = sorted(str(path.relative_to(here)) for path in here.rglob("*"))
        return Answer(done.returncode, done.stdout.decode(errors="replace"), left)

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, before[1]))
    try:
        with running_server(folder) as address:
            resource.setrlimit(resource.RLIMIT_AS, before)
            write_programs(folder, address)
            yield ask
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

"""A start that waits for others hears signals: it ends at once, with exit code 85, whatever it waits for."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_mem.errors import EXIT_REQUEUE
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.locks import lock_file, sign, try_lock
from dist_mem.runtime.network_interface import free_port
from tests.support.forked_ranks import Program
from tests.support.jobs import write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import said
from tests.support.ranks import launcher_environment


@contextmanager
def ranks(
    arguments: list[str], cwd: Path, variables: Mapping[str, str], *, size: int, only: int | None = None
) -> Iterator[list[Program]]:
    """Start the ranks of a job on one node, or one of them alone on its node."""
    port = free_port()
    own_node = {} if only is None else {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = range(size) if only is None else [only]
    environments = [
        {**os.environ, **launcher_environment(rank, size, port), **own_node, **variables} for rank in started
    ]
    found = [Program(arguments, cwd=cwd, environment=environment) for environment in environments]
    try:
        yield found
    finally:
        for program in found:
            program.kill()
            program.communicate()


def hears(program: Program) -> bool:
    """Whether it has a handler for SIGTERM."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{program.pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def printed(program: Program) -> str:
    return program._printed().decode()


def all_end(programs: Sequence[Program], name: str) -> None:
    """Assert that these end soon, for a signal of this name."""
    began = time.monotonic()
    texts = [program.communicate(timeout=limit(30))[0] for program in programs]
    assert [program.returncode for program in programs] == [EXIT_REQUEUE] * len(programs), texts
    said(texts[0].splitlines()[-1], name)
    assert time.monotonic() - began < limit(10)


@pytest.mark.parametrize(("name", "receivers"), [("SIGTERM", [0, 1]), ("SIGUSR2", [1]), ("SIGTERM", [0])])
def test_a_start_that_waits_for_another_jobs_compilation_names_it_and_stops(
    tmp_path: Path, books: Path, name: str, receivers: list[int]
) -> None:
    """Also where only one rank gets the signal."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    folder = tmp_path / "ops" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    with lock_file(folder / "dist_mem.lock") as lock:
        assert try_lock(lock)
        sign(lock)
        variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
        with ranks(["train", str(config)], tmp_path, variables, size=2) as programs:
            message = f"waiting for process {os.getpid()} on {node_name()}, which has been compiling deepspeed_shm_comm"
            wait_until(lambda: message in printed(programs[0]), "its message", seconds=120)
            for rank in receivers:
                programs[rank].send_signal(signal.Signals[name])
            all_end(programs, name)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_waits_for_other_ranks_stops(tmp_path: Path, books: Path, command: str, rank: int) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    subject = str(config) if command == "train" else str(tmp_path / "run")
    arguments = [command, subject, "watchdog.join_seconds=600"]
    with ranks(arguments, tmp_path, {}, size=2, only=rank) as programs:
        wait_until(lambda: hears(programs[0]), "its handler", seconds=60)
        if rank == 0:
            wait_until(lambda: "waiting until all ranks have started" in printed(programs[0]), "its message")
        programs[0].send_signal(signal.SIGTERM)
        all_end(programs, "SIGTERM")


def test_a_start_that_waits_for_a_sign_of_life_stops(tmp_path: Path, books: Path) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    (tmp_path / "run").mkdir()
    lease = {"host": "elsewhere", "pid": 7, "sight": "another boot", "machine": "another"}
    (tmp_path / "run" / "lease.json").write_text(json.dumps(lease))
    with ranks(["train", str(config)], tmp_path, {}, size=1) as programs:
        wait_until(lambda: "for a sign of life of process 7" in printed(programs[0]), "its message", seconds=60)
        programs[0].send_signal(signal.SIGTERM)
        all_end(programs, "SIGTERM")

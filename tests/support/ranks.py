"""Real ranks for tests: processes joined by gloo that stay alive and run one function after another.

Importing torch and DeepSpeed takes seconds; the ranks are forked from a process that has done so (fork_server.py).
"""

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dist_mem.runtime.network_interface import free_port
from tests.support.fork_server import fork_server


def launcher_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun or the deepspeed launcher sets for this rank on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ.update(launcher_environment(rank, size, port))
    from dist_mem.runtime import distributed

    world = distributed.initialize(threads=1)
    while (order := pipe.recv()) is not None:
        function, arguments = order
        try:
            pipe.send((True, function(world, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    distributed.shut_down(agreed=True)


class RankPool:
    """`size` processes in one process group."""

    def __init__(self, size: int) -> None:
        context = fork_server()
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(world, *arguments)` on all ranks; return the results by rank. Raise if any rank raises."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [f"rank {rank}:\n{text}" for rank, (is_well, text) in enumerate(answers) if not is_well]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


Pools = Callable[[int], RankPool]  # the fixture `rank_pool`: a number of ranks -> the pool

"""The state of one call of the command, and how it runs other commands: logged, stopped with it, started again."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.launch.local import tied
from dist_mem.runtime.environment import with_environment
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.runs import Run
from dist_mem.studies.tables import Scale, Table


class CommandError(RuntimeError):
    """A command of the table has failed; its output is in its log."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class StoppedError(Exception):
    """A signal was received; the running command has received it, saved and ended."""


@dataclass(frozen=True)
class Place:
    """What one of several runs at a time has of the machine."""

    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of its commands; None: that of this process."""
        return self.environment.get("CUDA_VISIBLE_DEVICES")


@dataclass
class Job:
    """The state of one call of the command."""

    table: Table
    scale: Scale
    out: Path
    runs: list[Run]
    ranks: int
    extra: list[str]  # overrides for every training and evaluation
    signal: StopSignal
    environment: dict[str, str] = field(default_factory=dict)

    def command(
        self,
        arguments: Sequence[str],
        log: str,
        *,
        also: Sequence[int] = (),
        place: Place = Place(),
        until: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run a command with its output in a separate log, and forward a signal to it. Returns its exit code.

        Args:
            until: asked twice a second; once it returns True, the command is stopped as by a signal.

        Raises:
            StoppedError: a signal was received.
            CommandError: the command failed, and its exit code is not in `also`.
        """
        path = self.out / "logs" / f"{log}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{shlex.join(arguments)}\n")
            stream.flush()
            environment = with_environment({**self.environment, **place.environment})
            # A group of its own: Ctrl-C and a closed terminal would end a launcher before its ranks have saved.
            process = subprocess.Popen(
                tied(arguments), stdout=stream, stderr=subprocess.STDOUT, env=environment, process_group=0
            )
            has_forwarded = False
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if not has_forwarded and (self.signal.received or until()):
                        process.terminate()  # only once: each signal interrupts a launcher
                        has_forwarded = True
        if self.signal.received:
            raise StoppedError
        if code not in (EXIT_DONE, *also):
            raise CommandError(f"{shlex.join(arguments)}: exit code {code}; see {path}", code)
        return code


def places(jobs: int, ranks: int, *, num_cores: int, gpus: Sequence[str]) -> list[Place]:
    """Divide the machine among runs at the same time: an even share of cores, and GPUs of their own.

    Args:
        gpus: their names in CUDA_VISIBLE_DEVICES.

    Raises:
        UnusableError: there are GPUs, but fewer than ranks.
    """
    if jobs == 1:
        return [Place()]
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores // (jobs * ranks)))}
    if not gpus:
        return [Place(threads)] * jobs
    if jobs * ranks > len(gpus):
        raise UnusableError(
            f"--jobs {jobs} with --ranks {ranks} takes {jobs * ranks} GPUs, but here are {len(gpus)}: give fewer"
        )
    own = [",".join(gpus[job * ranks : (job + 1) * ranks]) for job in range(jobs)]
    return [Place({**threads, "CUDA_VISIBLE_DEVICES": names}) for names in own]

"""The small job that the drill breaks: books, a configuration, two real ranks, and their output files."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dist_mem.checkpoint.manifest import list_steps, step_dir, verify
from dist_mem.config.values import dump
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.engine.cpu_op import BUFFER, SHM
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.processes import dist_mem
from dist_mem.runtime.ranks import environment_of_rank
from dist_mem.tracking.log import METRICS_FILE, read_points

RANKS = 2
SAVE_EVERY = 20  # steps
NO_END = 1_000_000  # steps, more than a job makes before it is broken
PATIENCE = 180.0  # timeout in seconds of every wait; the first start compiles DeepSpeed's op
_SYLLABLES = ("ba", "ko", "mi", "ru", "ten", "sol", "qua", "ver")
_CONFIG = {
    "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 32, "dropout": 0.1},
    "train": {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seg_len": 16,
        "steps": NO_END,
        "precision": "fp32",
        "threads": 1,
    },
    "checkpoint": {"every": SAVE_EVERY, "keep_last": 3},
    "schedule": {"kind": "constant"},
    "eval": {"every": None},
    "tracking": {"every": 1, "mlflow": False, "system_metrics": False},
    "launch": {"signal_seconds": 60},
}


class DrillError(Exception):
    """The job behaved unexpectedly; the message describes how."""


def prepare(folder: Path) -> Path:
    """Write books and configuration, and return the path of the configuration."""
    choose = random.Random(7)
    books = []
    for number in range(12):
        words = ["".join(choose.choices(_SYLLABLES, k=2)) for _ in range(choose.randint(100, 200))]
        books.append(SourceDocument(id=str(number), title=f"Book {number}", source=" ".join(words), year=1900))
    build_dataset({"train": books}, folder / "books", name="drill", tokenizer_kind="bytes")
    path = folder / "drill.yaml"
    path.write_text(
        dump({**_CONFIG, "data": {"path": str(folder / "books"), "train_split": "train"}}), encoding="utf-8"
    )
    return path


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` is true. Raises DrillError after PATIENCE seconds; `what` names the condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise DrillError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.01)


class DrillJob:
    """A run directory and the ranks that currently train in it."""

    def __init__(self, run_dir: Path, arguments: Sequence[str]) -> None:
        """Create a job without starting it.

        Args:
            arguments: YAML files and overrides of the user, then the configuration of `prepare`.
        """
        self.run_dir = run_dir
        self._arguments = [*arguments, f"run_dir={run_dir}", f"name={run_dir.name}"]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._starts = 0
        self._began = 0.0
        self.usual_start = 0.0  # `seconds_to_step` of the drill's first job
        self.seconds_to_step = 0.0  # seconds from this job's first start to the first step waited for

    def start(self, *overrides: str, **environment: str) -> None:
        """Start all ranks, with additional overrides and environment variables."""
        port = free_port()
        on_cpus = {} if torch.cuda.device_count() >= RANKS else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        more = {"OMP_NUM_THREADS": "1", **on_cpus, **environment}
        command = dist_mem("train", *self._arguments, *overrides)
        self._starts += 1
        self._began = time.monotonic()
        self.processes = []
        self._port = port
        for rank in range(RANKS):
            with self._output(rank).open("wb") as output:
                variables = environment_of_rank(rank, RANKS, port, more)
                self.processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))

    def _output(self, rank: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-start{self._starts}-rank{rank}.txt")

    def end(self) -> list[int]:
        """Wait until all ranks have ended by themselves and return their exit codes. Raises DrillError on timeout."""
        wait_for(lambda: all(process.poll() is not None for process in self.processes), "the ranks to end")
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """Kill the remaining ranks and remove their buffers in shared memory."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for path in SHM.glob(f"{BUFFER}_*_{self._port}_*"):
            path.unlink(missing_ok=True)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged. Raises DrillError on timeout or if the job ends before it."""

        def is_there() -> bool:
            if any(process.poll() is not None for process in self.processes) and self.last_step() < step:
                raise DrillError(
                    f"ended early with {[process.poll() for process in self.processes]}: {self.last_error()}"
                )
            return self.last_step() >= step

        wait_for(is_there, f"step {step}")
        self.seconds_to_step = self.seconds_to_step or time.monotonic() - self._began

    def last_error(self) -> str:
        """Return the last line of the ranks' output that contains an error."""
        texts = [self._output(rank).read_text(encoding="utf-8", errors="replace") for rank in range(RANKS)]
        errors = [line for text in texts for line in text.splitlines() if "rror" in line]
        return errors[-1].strip() if errors else "no error was printed"

    def last_step(self) -> int:
        """Return the newest logged step; 0 if there is none."""
        return max(self.losses(), default=0)

    def losses(self) -> dict[int, float]:
        """Return the training loss by step."""
        points = read_points(self.run_dir / METRICS_FILE)
        return {point.step: point.metrics["loss"] for point in points if "loss" in point.metrics}

    def newest_checkpoint(self) -> int:
        """Verify the newest checkpoint completely and return its step. Raises ValueError if it is damaged."""
        steps = list_steps(self.run_dir)
        if not steps:
            raise DrillError("there is no checkpoint")
        verify(step_dir(self.run_dir, steps[-1]))
        return steps[-1]

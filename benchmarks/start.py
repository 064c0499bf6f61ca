"""Measure the seconds from the start of a process to the end of its first training step, part by part.

    python benchmarks/start.py                 # about two minutes; one and two ranks on this machine's CPUs, MLflow on

The jobs use the sample library, the model of configs/demo.yaml, new run directories, an existing MLflow store, and one
CPU thread per rank; the table shows medians. This program starts the ranks with a launcher's variables; the time of a
launcher itself is measured separately. The parts are functions of the job, timed from outside. Those in which ranks
wait for each other include the waiting; "the rest" is the time between the parts. DeepSpeed's communication op is
compiled once per machine, in the first job, which is not timed; that job gives the share of its steps in which training
waits for data.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.common import ROOT, arguments_of, build_sample, load, output_of_rank0, start_ranks

from dist_mem.tracking.log import METRICS_FILE, read_points

CONFIG = ROOT / "configs" / "demo.yaml"
FIRST_STEP = "first step"
MODULES = {
    "import torch": "torch",
    "import omegaconf, configuration": "dist_mem.config",
    "import deepspeed": "dist_mem.engine.engine",
    "import the rest of dist_mem": "dist_mem.training.run",
}
# Timed calls: (module, name in it) -> part; for a class, creating an instance is timed.
PARTS = {
    ("dist_mem.cli.commands", "load_checked"): "read the configuration",
    ("dist_mem.runtime.distributed", "initialize"): "join the process group",
    ("dist_mem.training.run", "hold_run_dir"): "hold the run directory",
    ("dist_mem.training.opening", "_open_data"): "open tokenizer and indexes",
    ("dist_mem.training.compiling", "start_communication"): "load DeepSpeed's communication op",
    ("dist_mem.training.opening", "MemoryLM"): "make the model",
    ("dist_mem.training.opening", "Engine"): "initialize DeepSpeed",
    ("dist_mem.training.feed", "curriculum_reader"): "plan and open the lanes",
    ("dist_mem.training.opening", "start_tracking"): "start tracking (imports mlflow)",
    ("dist_mem.training.loop", "train_step"): FIRST_STEP,
}
REST = "the rest"
PYTHON_M = [sys.executable, "-m", "dist_mem"]
BIN = Path(sys.executable).parent
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "dist-mem --help": [*PYTHON_M, "--help"],
    "dist-mem config": [*PYTHON_M, "config"],
    "dist-mem config FILE": [*PYTHON_M, "config", str(CONFIG)],
    "dist-mem train FILE --check": [*PYTHON_M, "train", str(CONFIG), "--check"],
    "dist-mem train FILE key.misspelt=1": [*PYTHON_M, "train", str(CONFIG), "train.stepz=1"],
    "deepspeed launcher alone": [
        *(str(BIN / "deepspeed"), "--log_level", "error", "--num_gpus", "1", "--num_nodes", "1"),
        *("--no_local_rank", "--no_python", "/bin/true"),
    ],
    "torchrun alone": [str(BIN / "torchrun"), "--nproc_per_node", "1", "--no-python", "/bin/true"],
}


def timed(function: Callable[..., Any], part: str, seconds: dict[str, float], began: float) -> Callable[..., Any]:
    """Return `function` with its time added to a part; at the end of the first step, print all times and exit."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        mark = time.time()
        result = function(*arguments, **options)
        seconds[part] = seconds.get(part, 0.0) + time.time() - mark
        if part == FIRST_STEP:
            total = time.time() - began
            print(json.dumps({**seconds, REST: total - sum(seconds.values()), "total": total}), flush=True)
            os._exit(0)  # without waiting for MLflow
        return result

    return call


def measure_one_rank(began: float, arguments: list[str]) -> int:
    """Run the job of the command line in this process, and print the seconds of its parts as JSON."""
    seconds = {"start the interpreter": time.time() - began}
    for part, module in MODULES.items():
        mark = time.time()
        importlib.import_module(module)
        seconds[part] = time.time() - mark
    command_line = importlib.import_module("dist_mem.__main__")
    for (module, name), part in PARTS.items():
        owner = sys.modules[module]
        setattr(owner, name, timed(getattr(owner, name), part, seconds, began))
    return command_line.main(["train", *arguments])


def job_options(data: Path, run_dir: Path) -> list[str]:
    store = f"sqlite:///{run_dir.parent}/mlflow.db"
    return [
        str(CONFIG),
        f"data.path={data}",
        f"run_dir={run_dir}",
        f"tracking.uri={store}",
        "eval.every=null",
        "train.threads=1",
    ]


def start_job(data: Path, run_dir: Path, num_ranks: int) -> dict[str, float]:
    """Start a new job; return the seconds of every part on rank 0."""
    command = [sys.executable, __file__, "--rank", repr(time.time()), *job_options(data, run_dir)]
    return json.loads(output_of_rank0(start_ranks(command, num_ranks)).splitlines()[-1])


def first_job(data: Path, run_dir: Path) -> float:
    """Train some steps on two ranks; return the median share of time spent waiting for data."""
    options = ["train.steps=60", "schedule.warmup_steps=1", "tracking.every=10"]
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "-m", "dist_mem", "train"]
    subprocess.run([*launcher, *job_options(data, run_dir), *options], check=True, capture_output=True)
    points = [point.metrics for point in read_points(run_dir / METRICS_FILE)]
    return statistics.median(point["data_wait_share"] for point in points[1:])


def command_seconds(command: list[str]) -> float:
    began = time.time()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return time.time() - began


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}


def main() -> None:
    """Print both tables."""
    arguments = arguments_of(__doc__, rounds=3).parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        build_sample(data)
        wait_share = first_job(data, Path(folder) / "first")
        jobs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for number in range(arguments.rounds):
            for num_ranks, found in jobs.items():
                found.append(start_job(data, Path(folder) / f"run-{num_ranks}-{number}", num_ranks))
            for name, command in COMMANDS.items():
                commands[name].append(command_seconds(command))
    print(f"{load()}, {arguments.rounds} rounds")
    print(f"share of 50 steps of two ranks spent waiting for data: {wait_share:.4%}")
    print(f"{'to the end of the first step, seconds':<44}{'1 rank':>8}{'2 ranks':>9}")
    one, two = medians(jobs[1]), medians(jobs[2])
    for part in one:
        print(f"{part:<44}{one[part]:>8.2f}{two[part]:>9.2f}")
    for name, taken in commands.items():
        print(f"{name:<44}{statistics.median(taken):>8.2f}   {min(taken):.2f} to {max(taken):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(measure_one_rank(float(sys.argv[2]), sys.argv[3:]) or "the job ended before its first step")
    main()

"""Training jobs for tests: data on disk, real `dist-mem train` processes, bitwise comparison of checkpoints."""

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dist_mem.config import load_config
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.memory import memory_options
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.signals import StopSignal
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.training.meter import MEASUREMENTS
from dist_mem.training.run import run_job
from tests.support.forked_ranks import Program
from tests.support.limits import limit
from tests.support.ranks import launcher_environment

SYLLABLES = ["ba", "ko", "mi", "ru", "ten", "sol", "qua", "ver"]


def build_books(out: Path, **options: Any) -> Path:
    """Build a byte-tokenized corpus of 12 / 4 / 3 small books per split; `options` are those of `build_dataset`."""
    choose = random.Random(7)

    def book(split: str, number: int) -> SourceDocument:
        words = ["".join(choose.choices(SYLLABLES, k=2)) for _ in range(choose.randint(40, 160))]
        text_file = out / "texts" / split / f"{number}.txt"
        text_file.parent.mkdir(parents=True, exist_ok=True)
        text_file.write_text(" ".join(words) + "\n", encoding="utf-8")
        return SourceDocument(id=str(number), title=f"Book {number}", source=text_file, year=1900 + number)

    sizes = {"train": 12, "validation": 4, "test": 3}
    splits = {split: [book(split, number) for number in range(size)] for split, size in sizes.items()}
    build_dataset(splits, out / "shards", name="tiny", tokenizer_kind="bytes", **options)
    return out / "shards"


def write_config(
    path: Path, data: Path, run_dir: Path, *overrides: dict[str, Any], memory: dict[Any, Any] | None = None
) -> Path:
    """Write the YAML of a job with steps of a few milliseconds, with dropout, and accumulation 2 on two ranks."""
    base = {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "data": {"path": str(data)},
        "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 32, "dropout": 0.2},
        "memory": memory or {"kind": "transformer_xl", "mem_len": 24},
        "train": {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "seg_len": 16,
            "steps": 12,
            "precision": "fp32",
            "threads": 1,
        },
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "groups": [{"param_regex": "embedding", "lr": 1e-3}]},
        "checkpoint": {"every": 5},
        "tracking": {"every": 1, "mlflow": False},
        "deepspeed": {"zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0}},
    }
    OmegaConf.save(OmegaConf.merge(base, *overrides), path)
    return path


def start_ranks(arguments: list[str], *, world_size: int, cwd: Path, **variables: str) -> list[Program]:
    """Start `dist-mem ARGUMENTS` on every rank, as a launcher does, in processes forked from a warm one.

    Args:
        variables: of the environment of all ranks, beside those of the launcher.
    """
    port = free_port()
    return [
        Program(
            arguments, cwd=cwd, environment={**os.environ, **launcher_environment(rank, world_size, port), **variables}
        )
        for rank in range(world_size)
    ]


def finish(processes: Sequence[Program | subprocess.Popen[str]], *, timeout: float = 120) -> tuple[list[int], str]:
    """Wait for all ranks to end; return their exit codes and output."""
    texts = [process.communicate(timeout=limit(timeout))[0] for process in processes]
    return [int(process.returncode or 0) for process in processes], "\n".join(texts)


def run_ranks(arguments: list[str], *, world_size: int, cwd: Path, **variables: str) -> tuple[list[int], str]:
    """Start all ranks, and wait for their end; arguments as of `start_ranks`."""
    return finish(start_ranks(arguments, world_size=world_size, cwd=cwd, **variables))


def train_here(world: World, config_file: Path, changes: Sequence[str] = (), allowed: Sequence[str] = ()) -> int:
    """Run the training of `dist-mem train` in existing ranks; `allowed` is what --allow has."""
    stop_signal = StopSignal()
    try:
        config = load_config([str(config_file), *changes], memory_options=memory_options)
        return run_job(config, world, stop_signal, allowed)
    finally:
        stop_signal.restore()


def logged_steps(run_dir: Path) -> list[int]:
    """Return the steps in metrics.jsonl that count, without an incomplete last line."""
    return [point.step for point in read_points(run_dir / METRICS_FILE)]


def losses(run_dir: Path) -> list[float]:
    """Return the training loss of every step."""
    return [point.metrics["loss"] for point in read_points(run_dir / METRICS_FILE) if "loss" in point.metrics]


def figures(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Return every logged point without what the machine has to do with."""
    points = read_points(run_dir / METRICS_FILE)
    return [
        (point.step, {name: value for name, value in point.metrics.items() if name not in MEASUREMENTS})
        for point in points
    ]


def difference(first: Any, second: Any, *, where: str = "") -> str | None:
    """Return where two nested structures of tensors and plain values first differ bitwise; None if they are equal."""
    if isinstance(first, torch.Tensor):
        same = isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
        return None if same else where
    if isinstance(first, dict):
        if not isinstance(second, dict) or list(first) != list(second):
            return where
        return next(
            (found for key in first if (found := difference(first[key], second[key], where=f"{where}/{key}"))), None
        )
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return where
        parts = enumerate(zip(first, second, strict=True))
        return next((found for index, (a, b) in parts if (found := difference(a, b, where=f"{where}/{index}"))), None)
    if type(first) is not type(second):
        return where
    if hasattr(first, "__dict__"):  # DeepSpeed pickles its loss scaler as an object
        return difference(vars(first), vars(second), where=f"{where}.{type(first).__name__}")
    return None if first == second else where


def checkpoint_content(directory: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint that determine the resumed run."""
    content: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix == ".safetensors":
            content[name] = load_file(path)
        elif path.suffix == ".pt":
            content[name] = torch.load(path, weights_only=False)
    _clear_padding(content)
    return content


def _clear_padding(content: dict[str, Any]) -> None:
    """Zero the padding of ZeRO-3: undefined values in the last share of a parameter that the ranks do not divide."""
    for name, saved in content.items():
        states = content.get(name.replace("bf16_zero", "zero").replace("optim", "model"), {})
        if name.endswith("optim_states.pt") and "zero_pp_rank" in name and "param_shapes" in states:
            world_size = sum(other.endswith("optim_states.pt") for other in content)
            rank = int(name.split("zero_pp_rank_")[1].split("_")[0])
            groups = saved["optimizer_state_dict"].get("fp32_flat_groups", [])
            for flat, shapes in zip(groups, states["param_shapes"], strict=True):
                offset = 0
                for shape in shapes.values():
                    share = -(-shape.numel() // world_size)
                    held = max(0, min(share, shape.numel() - rank * share))
                    flat.data[offset + held : offset + share] = 0
                    offset += share


def stop_after_one_step(world: World, config: Path) -> int:
    stop_signal = StopSignal()
    stop_signal.received = "SIGTERM"
    try:
        return run_job(load_config([str(config)], memory_options=memory_options), world, stop_signal)
    finally:
        stop_signal.restore()

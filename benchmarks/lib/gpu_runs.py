"""The cases of gpu_cases.py that run `dist-mem`: equal numbers first, then speed. Each returns its result, or raises.

A small model of float32 is trained on one rank for the first: at every ZeRO stage; twice; killed and resumed; evaluated
on the CPU too. For speed, the models of configs/speed read random words in bfloat16 with data, ZeRO and optimizer, and
are killed once they are measured.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from lib.gpu_bench import Bench, FailedError, configuration_file
from lib.speed import memories

from dist_mem.config import load_config
from dist_mem.tracking.log import METRICS_FILE, read_points

BASE = "transformer_xl_base"
PUBLISHED = 59_961  # tokens/s of NVIDIA's base configuration on one A100 of 40 GB
TINY: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_head": None, "d_inner": 64},
    "train": {"global_batch_size": 4, "micro_batch_size": 4, "seg_len": 16},
}
STEPS, SAVED = 12, 4  # of the small runs; they save every SAVED steps
STAGES_AGREE = 1e-5  # largest difference of losses between ZeRO stages, as a share
DEVICES_AGREE = 1e-4  # largest difference of an evaluation's perplexity between GPU and CPU, as a share
TRAINED, STRAIGHT = "zero 2", "straight"  # the run that is evaluated; the one that a killed run must equal
ESTIMATE = (0.9, 1.1)  # of the memory that was measured


class Speed(NamedTuple):
    """A model whose training is measured."""

    size: str
    memory: str
    attention: str = "auto"
    is_compiled: bool = False

    @property
    def name(self) -> str:
        back_end = "" if self.attention == "auto" else f" {self.attention}"
        return f"speed {self.size} {self.memory}{back_end}{' compiled' if self.is_compiled else ''}"


def small_run(bench: Bench, name: str, **changes: Any) -> list[str]:
    """Return the arguments of a training of a small model in float32, with its run directory in OUT/runs/NAME."""
    run = {
        **TINY,
        "data": {"path": str(bench.out / "data" / "tiny")},
        "memory": {"kind": "transformer_xl", "mem_len": TINY["train"]["seg_len"]},
        "train": {**TINY["train"], "steps": STEPS, "precision": "fp32", **changes.pop("train", {})},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every": SAVED},
        "eval": {"every": None, "split": "train", "batch_size": 4, "max_document_len": 500},
        "tracking": {"mlflow": False, "every": 1},
        "run_dir": str(bench.out / "runs" / name.replace(" ", "_")),
        "preflight": False,  # the doctor has run
        **changes,
    }
    return ["train", str(configuration_file("125m")), str(written(bench.out / "runs" / f"{name}.yaml", run))]


def written(path: Path, keys: dict[str, Any]) -> Path:
    """Write a configuration, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(keys))
    return path


def start_again(bench: Bench, name: str) -> tuple[Path, Path]:
    """Return the run directory of a case, without what an interrupted call left, and the file for its output."""
    run_dir = bench.out / "runs" / name.replace(" ", "_")
    shutil.rmtree(run_dir, ignore_errors=True)
    return run_dir, bench.out / "runs" / f"{name.replace(' ', '_')}.txt"


def logged(run_dir: Path, metric: str) -> list[float]:
    """Return a logged metric, by step."""
    return [point[metric] for point in points(run_dir) if metric in point]


def points(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged points of a run; none before the first."""
    return [{**point.metrics, "step": point.step} for point in read_points(run_dir / METRICS_FILE)]


def zero_stage(bench: Bench, name: str) -> dict[str, Any]:
    """Train at a ZeRO stage: the losses are those of stage 0, which is the first case."""
    stage = int(name.split()[1])
    run_dir, output = start_again(bench, name)
    blocks = {"train": {"compile": True}} if name.endswith("compiled") else {}
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    bench.run(small_run(bench, name, deepspeed=zero, **blocks), output)
    losses, expected = logged(run_dir, "loss"), logged(bench.out / "runs" / "zero_0", "loss")
    if len(losses) != STEPS or len(expected) != STEPS:
        raise FailedError(f"{len(losses)} and {len(expected)} losses instead of {STEPS}", "")
    error = max(abs(one / other - 1.0) for one, other in zip(losses, expected, strict=True))
    return verdict(error <= STAGES_AGREE, error=error, limit=STAGES_AGREE, last_loss=losses[-1])


def repeated(bench: Bench, name: str) -> dict[str, Any]:
    """Train twice from the start: the checkpoints have equal bits. Else a resumed run cannot be compared."""
    for run in (STRAIGHT, name):
        _, output = start_again(bench, run)
        bench.run(small_run(bench, run), output)
    return equal_bits(bench, name)


def resumed(bench: Bench, name: str) -> dict[str, Any]:
    """Kill a training after its first checkpoint, and resume it: the bits are those of the straight run."""
    run_dir, output = start_again(bench, name)
    arguments = small_run(bench, name)
    first = run_dir / "checkpoints" / f"step-{SAVED:08}" / "manifest.json"
    bench.wait(bench.command(arguments, output), output, until=first.exists)
    bench.kill()
    killed_at = len(logged(run_dir, "loss"))
    bench.run(arguments, output)
    return equal_bits(bench, name, killed_after_step=killed_at)


def equal_bits(bench: Bench, name: str, **more: Any) -> dict[str, Any]:
    """Compare the last checkpoint of a run with that of the straight run."""
    folders = [bench.out / "runs" / run.replace(" ", "_") for run in (STRAIGHT, name)]
    manifests = [folder / "checkpoints" / f"step-{STEPS:08}" / "manifest.json" for folder in folders]
    files = [json.loads(path.read_text())["files"] for path in manifests]
    ours = [{file: entry["sha256"] for file, entry in each.items() if file.startswith("ranks/")} for each in files]
    return verdict(ours[0] == ours[1], files=len(ours[0]), sha256=[each[:12] for each in ours[1].values()], **more)


def evaluated(bench: Bench, name: str) -> dict[str, Any]:
    """Evaluate a run on the device and on the CPU: the losses are equal within a tolerance."""
    run_dir, found = bench.out / "runs" / TRAINED.replace(" ", "_"), {}
    for where in ("device", "cpu"):
        output = bench.out / "runs" / f"{name}_{where}.txt"
        shutil.rmtree(run_dir / "evaluations", ignore_errors=True)
        arguments = ["evaluate", str(run_dir), "--split", "train", "eval.batch_size=4"]
        start = bench.command if where == "device" else bench.on_cpu
        bench.wait(start(arguments, output), output)
        (report,) = (run_dir / "evaluations").glob("*.json")
        found[where] = json.loads(report.read_text())["metrics"]["train/token_perplexity"]
    error = abs(found["device"] / found["cpu"] - 1.0)
    return verdict(error <= DEVICES_AGREE, error=error, limit=DEVICES_AGREE, token_perplexity=found)


def verdict(is_right: bool, **numbers: Any) -> dict[str, Any]:
    return {"status": "passed" if is_right else "failed", **numbers}


def speed_configuration(bench: Bench, speed: Speed, run_dir: Path, micro_lanes: int | None) -> dict[str, Any]:
    """Return what is laid over configs/speed/SIZE.yaml."""
    size, is_tiny = load_config([str(configuration_file(speed.size))]), bench.settings.is_tiny
    every, measured = cadence(speed, is_tiny=is_tiny)
    seg_len = TINY["train"]["seg_len"] if is_tiny else size.train.seg_len
    changes: dict[str, Any] = {block: dict(keys) for block, keys in TINY.items()} if is_tiny else {}
    model, train = changes.setdefault("model", {}), changes.setdefault("train", {})
    if is_tiny and size.model.adaptive:
        model["adaptive"] = {"cutoffs": [20, 100]}
    if speed.memory == "causal":
        model |= {"kind": "gpt2", "num_positions": seg_len, "adaptive": None, "d_head": None}
    train |= {"steps": 10**6, "compile": speed.is_compiled, "profile": [measured, measured + 1]}
    train |= {"micro_batch_size": micro_lanes} if micro_lanes else {}
    return {
        **changes,
        "data": {"path": str(data_of(bench, size.data.path))},
        "model": model | {"attention": speed.attention},
        "memory": {"kind": "causal"} if speed.memory == "causal" else memories(seg_len)[speed.memory],
        "tracking": {"mlflow": False, "every": every},
        "preflight": False,
        "run_dir": str(run_dir),
        "schedule": {"kind": "constant", "warmup_steps": 0},
    }


def data_of(bench: Bench, path: str) -> Path:
    """Return the folder of the random words that a file of configs/speed reads from data/speed_NUM_WORDS."""
    return bench.out / "data" / ("tiny" if bench.settings.is_tiny else Path(path).name)


def cadence(speed: Speed, *, is_tiny: bool) -> tuple[int, int]:
    """Return the updates between two logged points, and the update after which the trace begins."""
    every = 2 if is_tiny or speed.size == "1.3b" else 5
    return every, 4 * every


def measured(bench: Bench, speed: Speed, micro_lanes: int | None) -> dict[str, Any]:
    """Train until the speed is measured and the trace is written; end it without a save."""
    name = f"{speed.name}{f' of {micro_lanes} lanes' if micro_lanes else ''}"
    run_dir, output = start_again(bench, name)
    keys = speed_configuration(bench, speed, run_dir, micro_lanes)
    arguments = ["train", str(configuration_file(speed.size)), str(written(output.with_suffix(".yaml"), keys))]
    every, last = keys["tracking"]["every"], keys["train"]["profile"][0]

    def is_measured() -> bool:
        traces = list((run_dir / "profile").glob("*.txt"))
        return bool(traces) and any(point["step"] >= last for point in points(run_dir))

    bench.wait(bench.command(arguments, output), output, until=is_measured)
    bench.kill()
    found = [point for point in points(run_dir) if every < point["step"] <= last]  # the first point has the start
    names = ("tokens_per_second", "step_seconds", "mfu", "data_wait_share")
    medians = {name: statistics.median(point[name] for point in found) for name in names if name in found[0]}
    peak = max(point["peak_memory_gb"] for point in found)
    return {"status": "done", "micro_lanes": micro_lanes, **medians, "peak_memory_gb": peak} | {
        "operators": operators(next((run_dir / "profile").glob("*.txt")).read_text())
    }


def operators(table: str) -> list[dict[str, str]]:
    """Return name and own time of the costliest operators of a table of torch's profiler, the device's if it is there.

    Its columns are as wide as its three rulers: around the names of the columns, and after the last operator.
    """
    lines = [line for line in table.splitlines() if line.strip()]
    rulers = [number for number, line in enumerate(lines) if set(line.strip()) == {"-", " "}]
    columns = [slice(*found.span()) for found in re.finditer("-+", lines[rulers[0]])]
    head, *body = [[lines[number][column].strip() for column in columns] for number in range(rulers[0] + 1, rulers[2])]
    own = head.index("Self CUDA") if "Self CUDA" in head else head.index("Self CPU")
    return [{"name": row[0], head[own]: row[own]} for row in body[1:]]


def speed_of_largest_batch(bench: Bench, speed: Speed) -> dict[str, Any]:
    """Measure; if the GPU runs out of memory, again with half of the lanes at once."""
    lanes = load_config([str(configuration_file(speed.size))]).train.micro_batch_size
    micro_lanes: int | None = None
    while True:
        try:
            return measured(bench, speed, micro_lanes)
        except FailedError as error:
            bench.kill()
            if error.status != "out of memory" or lanes == 1 or bench.settings.is_tiny:
                raise
            lanes //= 2
            micro_lanes = lanes

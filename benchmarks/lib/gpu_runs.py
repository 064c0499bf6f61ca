"""The cases of gpu_cases.py that run `dist-mem` and compare numbers. Each returns its result, or raises.

A small model of float32 is trained on one rank at every ZeRO stage; twice; killed and resumed; evaluated on the CPU
too; and by two ranks that share the device, joined by gloo, as NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lib.gpu_bench import Bench, FailedError, configuration_file
from lib.gpu_models import TINY

from dist_mem.tracking.log import METRICS_FILE, read_points

STEPS, SAVED = 12, 4  # of the small runs; they save every SAVED steps
STAGES_AGREE = 1e-5  # largest difference of losses between ZeRO stages, as a share
DEVICES_AGREE = 1e-4  # largest difference of an evaluation's perplexity between GPU and CPU, as a share
TRAINED, STRAIGHT = "zero 2", "straight"  # the run that is evaluated; the one that a killed run must equal
TWO = "two ranks zero "  # names of the cases of two ranks begin so


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


def two_ranks(bench: Bench, name: str) -> dict[str, Any]:
    """Train on two ranks at a ZeRO stage, killed after the first checkpoint and resumed.

    The losses are those of one rank; a resumed run equals the straight one of its two ranks bit by bit.
    """
    stage = int(name.removeprefix(TWO))
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    changes = {"deepspeed": zero, "train": {"micro_batch_size": 2}}
    straight = f"{name} straight"
    for run in (straight, name):
        run_dir, output = start_again(bench, run)
        arguments = small_run(bench, run, **json.loads(json.dumps(changes)))
        if run == name:
            first = run_dir / "checkpoints" / f"step-{SAVED:08}" / "manifest.json"
            ranks = bench.ranks(arguments, output)
            bench.wait(ranks[0], output, until=first.exists)
            bench.kill()
        for rank in bench.ranks(arguments, output):
            bench.wait(rank, output)
        bench.kill()
    losses, expected = (logged(bench.out / "runs" / run.replace(" ", "_"), "loss") for run in (name, "zero 0"))
    if len(losses) != STEPS or len(expected) != STEPS:
        raise FailedError(f"{len(losses)} and {len(expected)} losses instead of {STEPS}", "")
    error = max(abs(one / other - 1.0) for one, other in zip(losses, expected, strict=True))
    same = equal_bits(bench, name, straight=straight)
    is_right = error <= STAGES_AGREE and same["status"] == "passed"
    return {**same, **verdict(is_right, error=error, limit=STAGES_AGREE, equal_bits=same["status"] == "passed")}


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


def equal_bits(bench: Bench, name: str, *, straight: str = STRAIGHT, **more: Any) -> dict[str, Any]:
    """Compare the last checkpoint of a run with that of a straight run."""
    folders = [bench.out / "runs" / run.replace(" ", "_") for run in (straight, name)]
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

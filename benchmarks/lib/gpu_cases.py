"""Train every memory for a few updates at several sizes, back ends and with torch.compile; see benchmarks/gpu.sh.

    PYTHONPATH=benchmarks python -m lib.gpu_cases --out gpu_results
    PYTHONPATH=benchmarks python -m lib.gpu_cases --out /tmp/tiny --cpu --tiny

Each case is a real `dist-mem train` with data, ZeRO and optimizer, in a process of its own: one that runs out of memory
is recorded, and tried again with half of the lanes at once. Results are written after every case; started again, the
program makes the cases that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lib.common import ROOT, load
from lib.random_words import build_random_words
from memory import memories

from dist_mem.config import Config, load_config
from dist_mem.config.keys import find_key
from dist_mem.runtime.files import write_text
from dist_mem.tracking.provenance import running_commit, versions

BASE = "transformer_xl_base"
PUBLISHED = 59_961  # tokens/s of NVIDIA's base configuration on one A100 of 40 GB
SIZES = ("125m", "350m", "1.3b", BASE)
_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "Cannot allocate", "this needs at least")  # the last: our own
TINY = {
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_head": None, "d_inner": 64},
    "train": {"global_batch_size": 4, "micro_batch_size": 4, "seg_len": 16},
}


class Case(NamedTuple):
    """What is measured."""

    size: str  # file in configs/speed
    memory: str
    attention: str  # of model.attention; "simple" where the package has no such key
    compiled: bool

    @property
    def name(self) -> str:
        return f"{self.size} {self.memory} {self.attention}{' compiled' if self.compiled else ''}"


class Plan(NamedTuple):
    """How all cases are measured."""

    out: Path
    every: int  # steps between two logged points
    steps: int  # measured ones are those after the first point
    seconds: float  # longest time of a case
    tiny: bool
    extra: list[str]  # overrides of all cases


def all_cases(sizes: list[str], *, only: list[str], attentions: list[str], compiles: list[str]) -> Iterator[Case]:
    """Yield the cases: every memory, with every back end that the package has, compiled or not.

    Args:
        only, attentions: the memories and back ends to take; empty: all.  compiles: among yes and no.
    """
    attention, compiled = find_key(Config, "model.attention"), find_key(Config, "train.compile")
    back_ends = [name for name in attention.metadata.choices if name != "auto"] if attention else ["simple"]
    for size in sizes:
        kinds = ["transformer_xl"] if size == BASE else ["causal", *memories(1)]
        for kind in kinds:
            for back_end in back_ends:
                for is_compiled in (False, True) if compiled else (False,):
                    is_wanted = kind in (only or [kind]) and back_end in (attentions or [back_end])
                    if is_wanted and ("yes" if is_compiled else "no") in compiles:
                        yield Case(size, kind, back_end, is_compiled)


def configuration(case: Case, plan: Plan, run_dir: Path, micro_lanes: int | None) -> dict[str, Any]:
    """Return what is laid over configs/speed/SIZE.yaml."""
    size = load_config([str(ROOT / "configs" / "speed" / f"{case.size}.yaml")])
    seg_len = TINY["train"]["seg_len"] if plan.tiny else size.train.seg_len
    changes: dict[str, Any] = {"model": {}, "train": {}}
    if plan.tiny:
        changes = {block: dict(keys) for block, keys in TINY.items()}
        changes["data"] = {"path": str(plan.out / "data_tiny")}
        if size.model.adaptive:
            changes["model"]["adaptive"] = {"cutoffs": [20, 100]}
    if case.memory == "causal":
        changes["model"] |= {"kind": "gpt2", "num_positions": seg_len, "adaptive": None, "d_head": None}
    changes["memory"] = {"kind": "causal"} if case.memory == "causal" else memories(seg_len)[case.memory]
    changes["train"] |= {"steps": 10**6} | ({"micro_batch_size": micro_lanes} if micro_lanes else {})
    if find_key(Config, "model.attention"):
        changes["model"]["attention"] = case.attention
    if find_key(Config, "train.compile"):
        changes["train"]["compile"] = case.compiled
    if find_key(Config, "train.profile"):
        changes["train"]["profile"] = [plan.steps, plan.steps + min(3, plan.every - 1)]  # after what is measured
    supervision = {"tracking": {"mlflow": False, "every": plan.every}, "preflight": False}  # the doctor has run
    return {**changes, **supervision, "run_dir": str(run_dir), "schedule": {"kind": "constant", "warmup_steps": 0}}


def measure(case: Case, plan: Plan, micro_lanes: int | None = None) -> dict[str, Any]:
    """Train a case until it has made its steps, end it without a save, and return its result."""
    folder = plan.out / "runs" / f"{case.name.replace(' ', '_').replace(',', '')}-{micro_lanes or 'all'}"
    folder.mkdir(parents=True, exist_ok=True)
    changes = configuration(case, plan, folder / "run", micro_lanes)
    (folder / "case.yaml").write_text(json.dumps(changes))
    config = [str(ROOT / "configs" / "speed" / f"{case.size}.yaml"), str(folder / "case.yaml"), *plan.extra]
    began = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "dist_mem", "train", *config]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            ended = wait_for_points(process, folder / "run", plan)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # without the save of a model that nobody wants
                process.wait()
    result = {**case._asdict(), "micro_lanes": micro_lanes, "status": ended, "seconds": time.monotonic() - began}
    text = (folder / "output.txt").read_text(errors="replace")
    if ended == "done":
        return result | figures(folder / "run")
    if any(sign in text for sign in _OUT_OF_MEMORY):
        result["status"] = "out of memory"
    return result | {"exit_code": process.returncode, "output": text[-1500:]}


def points(run_dir: Path) -> list[dict[str, Any]]:
    """Return the logged points of a run; none before the first."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    logged = [json.loads(line) for line in lines]
    return [{**one["metrics"], "step": one["step"]} for one in logged if "tokens_per_second" in one["metrics"]]


def wait_for_points(process: subprocess.Popen[bytes], run_dir: Path, plan: Plan) -> str:
    """Return done, failed or too slow."""
    deadline = time.monotonic() + plan.seconds
    last = plan.steps + plan.every  # by then the trace is written too
    while time.monotonic() < deadline:
        found = points(run_dir)
        if found and found[-1]["step"] >= last:
            return "done"
        if process.poll() is not None:
            return "refused" if process.returncode == 2 else "failed"
        time.sleep(0.2)
    return "too slow"


def figures(run_dir: Path) -> dict[str, Any]:
    """Return medians of the measured points, the peak of memory, and the table of operators."""
    measured = points(run_dir)[1:-1]  # the first has the start, the last the trace
    names = ("tokens_per_second", "step_seconds", "mfu", "data_wait_share")
    found = {name: statistics.median(p[name] for p in measured) for name in names if name in measured[0]}
    tables = sorted((run_dir / "profile").glob("*.txt"))
    profile = {"operators": tables[0].read_text()} if tables else {}
    return {**found, "peak_memory_gb": max(point["peak_memory_gb"] for point in measured), **profile}


def until_it_fits(case: Case, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the result of a case, and after it of half of the lanes at once while it runs out of memory."""
    lanes = load_config([str(ROOT / "configs" / "speed" / f"{case.size}.yaml")]).train.micro_batch_size
    yield (result := measure(case, plan))
    while result["status"] == "out of memory" and lanes > 1 and not plan.tiny:
        lanes //= 2
        yield (result := measure(case, plan, lanes))


def machine(out: Path) -> dict[str, Any]:
    """Return what the figures were measured on."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    doctor = out / "doctor.txt"
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "load": load(),
        "versions": versions(),
        "commit": running_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "doctor": doctor.read_text() if doctor.exists() else None,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| size | memory | attention | compiled | tokens/s | MFU | peak GB | ms a step | |", "|---" * 9 + "|"]
    for one in results:
        name = f"| {one['size']} | {one['memory']} | {one['attention']} | {'yes' if one['compiled'] else 'no'} | "
        note = f"{one['micro_lanes']} lanes at once" if one["micro_lanes"] else ""
        if one["status"] != "done":
            lines.append(f"{name}| | | | {', '.join(filter(None, [one['status'], note]))} |")
            continue
        if one["size"] == BASE and torch.cuda.is_available():
            note = f"{note} {one['tokens_per_second'] / PUBLISHED:.2f} x NVIDIA's on one A100".strip()
        mfu = f"{one['mfu']:.1%}" if "mfu" in one else ""
        speed = (
            f"{one['tokens_per_second']:,.0f} | {mfu} | {one['peak_memory_gb']:.2f} | {one['step_seconds'] * 1e3:,.1f}"
        )
        lines.append(f"{name}{speed} | {note} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Make the cases that are missing, and write both files after each; 1 if no case of all could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results; default: %(default)s")
    parser.add_argument("--sizes", default=",".join(SIZES), help="default: %(default)s")
    parser.add_argument("--memories", default="", help="names with commas between; default: all")
    parser.add_argument("--attention", default="", help="back ends with commas between; default: all")
    parser.add_argument("--compile", default="no,yes", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1200.0, help="longest time of a case; default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="measure CPUs, which shows only that everything runs")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers and a few words")
    parser.add_argument("extra", nargs="*", help="overrides of all cases, as train.precision=fp16")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; started again, the missing cases are made"))
    if not (options.cpu or torch.cuda.is_available()):
        sys.exit("error: torch sees no GPU here; --cpu --tiny shows on CPUs that everything runs")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    every, steps = (2, 6) if options.tiny else (10, 40)
    out = options.out.resolve()
    plan = Plan(out, every, steps, options.seconds, options.tiny, options.extra)
    sizes = options.sizes.split(",")
    if unknown := set(sizes) - set(SIZES):
        parser.error(f"--sizes: {', '.join(sorted(unknown))} is not among {', '.join(SIZES)}")
    build_data(plan, sizes)
    kept = json.loads((out / "gpu.json").read_text())["cases"] if (out / "gpu.json").exists() else []
    made = {Case(*(one[name] for name in Case._fields)) for one in kept}
    only, attentions = (list(filter(None, text.split(","))) for text in (options.memories, options.attention))
    for case in all_cases(sizes, only=only, attentions=attentions, compiles=options.compile.split(",")):
        if case in made:
            continue
        for result in until_it_fits(case, plan):
            kept.append(result)
            print(f"{case.name}: {result['status']}, {result.get('tokens_per_second', 0):,.0f} tokens/s", flush=True)
            write_text(out / "gpu.json", json.dumps({"machine": machine(out), "cases": kept}, indent=1))
            write_text(out / "gpu.md", table(kept))
    return 0 if any(one["status"] == "done" for one in kept) else 1


def build_data(plan: Plan, sizes: list[str]) -> None:
    """Make the random words that the sizes read, unless they are there; a build that was interrupted continues."""
    if plan.tiny:
        build_random_words(plan.out / "data_tiny", num_words=500, num_tokens=20_000)
        return
    for path in {load_config([str(ROOT / "configs" / "speed" / f"{size}.yaml")]).data.path for size in sizes}:
        build_random_words(ROOT / path, num_words=int(path.rpartition("_")[2]), num_tokens=6_000_000)


if __name__ == "__main__":
    sys.exit(main())

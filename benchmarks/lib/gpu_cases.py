"""Check and measure dist_mem on a GPU, the cases that tell most first; see benchmarks/gpu.sh.

Results are written after every case: OUT/gpu.json, and OUT/gpu.md as a table. A case that the end of the time
interrupts leaves no result, and is the first of the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lib.common import load
from lib.gpu_bench import Bench, FailedError, Settings, TimeUpError, build_words, configuration_file
from lib.gpu_numbers import names
from lib.gpu_runs import (
    BASE,
    ESTIMATE,
    PUBLISHED,
    Speed,
    data_of,
    evaluated,
    repeated,
    resumed,
    speed_configuration,
    speed_of_largest_batch,
    zero_stage,
)
from lib.speed import memories

from dist_mem.config import load_config
from dist_mem.runtime.files import write_text
from dist_mem.runtime.versions import code_versions
from dist_mem.tracking.provenance import running_commit

Make = Callable[[Bench], dict[str, Any]]
SECONDS = {"numbers": 60.0, "attention": 300.0, "run": 120.0, "compiled": 300.0, "1.3b": 300.0}  # limits of a case
GOOD = ("passed", "done")
LEAST_SECONDS = 10.0  # that must be left to begin a case
SMALL_WORDS, SMALL_TOKENS, SPEED_TOKENS = 500, 20_000, 1_500_000


class Case(NamedTuple):
    """What is checked or measured, and how long it may take."""

    name: str
    seconds: float
    make: Make | None  # None: of gpu_numbers.py, whose cases share a process


def all_cases() -> list[Case]:
    """Return the cases in the order in which they are made."""
    seconds = {name: SECONDS["attention" if name.startswith("attention") else "numbers"] for name in names()}
    numbers = [Case(name, limit, None) for name, limit in seconds.items()]
    stages = [*(f"zero {stage}" for stage in range(4)), "zero 2 compiled"]
    runs: list[tuple[str, Callable[[Bench, str], dict[str, Any]]]] = [
        *((name, zero_stage) for name in stages[:4]),
        ("repeat", repeated),
        ("resume after kill -9", resumed),
        ("evaluation on the device and the CPU", evaluated),
        (stages[4], zero_stage),
    ]
    checks = [_run(name, make) for name, make in runs]
    return [*numbers, *checks, *map(_speed, speeds())]


def _run(name: str, make: Callable[[Bench, str], dict[str, Any]]) -> Case:
    compiles = name in ("zero 0", "zero 2 compiled")  # the first training compiles DeepSpeed's operators
    return Case(name, SECONDS["compiled" if compiles else "run"], lambda bench: make(bench, name))


def _speed(speed: Speed) -> Case:
    kind = "1.3b" if speed.size == "1.3b" else "compiled" if speed.is_compiled else "run"
    return Case(speed.name, SECONDS[kind], lambda bench: speed_of_largest_batch(bench, speed))


def speeds() -> Iterable[Speed]:
    """Yield what is measured: NVIDIA's configuration, every memory, compiled blocks, back ends, then larger models."""
    first = ("transformer_xl", "causal", "gated_deltanet", "infinite", "titans")
    yield Speed(BASE, "transformer_xl")
    yield Speed(BASE, "transformer_xl", is_compiled=True)
    yield from (Speed("125m", memory) for memory in (*first, *(name for name in memories(1) if name not in first)))
    yield from (Speed("125m", memory, is_compiled=True) for memory in first)
    yield from (Speed("125m", "transformer_xl", back_end) for back_end in ("simple", "chunked", "sdpa"))
    for is_compiled in (False, True):
        for size in ("350m", "1.3b"):
            yield from (Speed(size, memory, is_compiled=is_compiled) for memory in first)


def make_cases(bench: Bench, missing: list[Case], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Make the cases in order and keep each result. Raises TimeUpError when the time of this call is up."""
    numbers = [case for case in missing if case.make is None]
    _make_numbers(bench, numbers, keep)
    for case in missing:
        if case.make is not None:
            began = time.monotonic()
            _require_time(bench)
            bench.begin(case.seconds)
            try:
                result = case.make(bench)
            except FailedError as error:
                result = {"status": error.status, "output": error.output}
            finally:
                bench.kill()
            keep(case.name, {**result, "seconds": round(time.monotonic() - began, 1)})


def _require_time(bench: Bench) -> None:
    if time.monotonic() > bench.settings.deadline - LEAST_SECONDS:
        raise TimeUpError


def _make_numbers(bench: Bench, cases: list[Case], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Make the cases of gpu_numbers.py in one process, and in a new one after a case that ended it."""
    while cases:
        _require_time(bench)
        worker = bench.worker({"numbers": [case.name for case in cases], "device": bench.device})
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_lines, args=(worker, lines), daemon=True).start()
        began = time.monotonic()
        try:
            while cases:
                began = time.monotonic()
                bench.begin(cases[0].seconds)
                result = _next_result(bench, lines)
                keep(result.pop("case"), {**result, "seconds": round(time.monotonic() - began, 1)})
                cases = cases[1:]
        except FailedError as error:
            seconds = round(time.monotonic() - began, 1)
            keep(cases[0].name, {"status": error.status, "output": error.output, "seconds": seconds})
            cases = cases[1:]
        finally:
            bench.kill()


def _read_lines(worker: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put("")


def _next_result(bench: Bench, lines: queue.Queue[str]) -> dict[str, Any]:
    while True:
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            bench.check_time()
            continue
        if not line:
            raise FailedError("ended", (bench.out / "workers.txt").read_text(errors="replace")[-1500:])
        result: dict[str, Any] = json.loads(line)
        return result


def machine(settings: Settings) -> dict[str, Any]:
    """Return what the results were measured on."""
    return {
        "card": card(settings),
        "load": load(),
        "versions": code_versions(),
        "commit": running_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def card(settings: Settings) -> str:
    """Return the name of the GPU."""
    if settings.is_cpu:
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return lines[int(first)] if first.isdigit() and int(first) < len(lines) else lines[0]


def prepare(bench: Bench) -> list[subprocess.Popen[bytes]]:
    """Start, beside the first cases: the doctor, the random words, and the estimates of memory; return the words'."""
    settings, sizes = bench.settings, dict.fromkeys(speed.size for speed in speeds())
    start: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": (bench.out / "prepare.txt").open("a")}
    small = bench.out / "data" / "tiny"
    subprocess.run(build_words(small, SMALL_WORDS, SMALL_TOKENS), check=True, **start)
    builds = []
    if not settings.is_tiny:
        paths = dict.fromkeys(load_config([str(configuration_file(size))]).data.path for size in sizes)
        for path in paths:
            words = int(path.rpartition("_")[2])
            builds.append(subprocess.Popen(build_words(data_of(bench, path), words, SPEED_TOKENS), **start))
    with (bench.out / "doctor.txt").open("w") as report:
        subprocess.Popen([sys.executable, "-m", "dist_mem", "doctor"], stdout=report, stderr=report)
    estimates = [sys.executable, "-m", "lib.gpu_cases", "--estimate", "--out", str(bench.out)]
    subprocess.Popen([*estimates, *(["--tiny"] if settings.is_tiny else []), *(["--cpu"] if settings.is_cpu else [])])
    return builds


def estimate(bench: Bench) -> None:
    """Write the memory that is predicted for every model whose speed is measured to OUT/estimates.json."""
    from dist_mem.estimate.memory import training_parts

    path = bench.out / "estimates.json"
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    for speed in speeds():
        if speed.name in found or speed.is_compiled:  # as without compilation
            continue
        keys = json.dumps(speed_configuration(bench, speed, bench.out, None))
        laid_over = bench.out / "estimate.yaml"
        laid_over.write_text(keys)
        config = load_config([str(configuration_file(speed.size)), str(laid_over)])
        vocab = 1 + (SMALL_WORDS if bench.settings.is_tiny else 267_735 if speed.size == BASE else 50_257)
        parts = training_parts(config, vocab, world_size=1, on_gpu=not bench.settings.is_cpu)
        found[speed.name] = sum(part.num_bytes for part in parts)
        write_text(path, json.dumps(found, indent=1))


def tables(made: dict[str, Any], about: dict[str, Any], estimates: dict[str, int]) -> str:
    """Return the results as Markdown."""
    lines = [f"{about['card']}, {', '.join(f'{name} {text}' for name, text in about['versions'].items())}", ""]
    lines += ["| check | result | error | limit | s |", "|---|---|---|---|---|"]
    for name, one in made.items():
        if not name.startswith("speed "):
            pairs = [(one[key], one[f"{key}_limit"]) for key in ("float64", "float32", "bfloat16") if key in one]
            pairs = pairs or [(one[key], one["limit"]) for key in ("error",) if key in one]
            errors, limits = ("; ".join(f"{pair[side]:.1e}" for pair in pairs) for side in (0, 1))
            lines.append(f"| {name} | {one['status']} | {errors} | {limits} | {one.get('seconds', '')} |")
    lines += ["", "Errors of memories: float64; float32; bfloat16. Of attention: float32; bfloat16.", ""]
    lines += ["| model | tokens/s | MFU | peak GB | estimate/peak | ms per update | |", "|---|---|---|---|---|---|---|"]
    for name, one in made.items():
        if name.startswith("speed "):
            lines.append(_speed_row(name, one, estimates.get(name.removesuffix(" compiled"))))
    return "\n".join(lines) + "\n"


def _speed_row(name: str, one: dict[str, Any], estimated: int | None) -> str:
    notes = [f"{one['micro_lanes']} lanes at once"] if one.get("micro_lanes") else []
    title = name.removeprefix("speed ")
    if one["status"] != "done":
        return f"| {title} | | | | | | {', '.join([one['status'], *notes])} |"
    if title.startswith(BASE):
        notes.append(f"{one['tokens_per_second'] / PUBLISHED:.2f} x NVIDIA's on one A100")
    mfu, ratio = f"{one['mfu']:.1%}" if "mfu" in one else "", ""
    if estimated and not one.get("micro_lanes"):
        share = estimated / 1e9 / one["peak_memory_gb"]
        ratio = f"{share:.2f}" if ESTIMATE[0] <= share <= ESTIMATE[1] else f"**{share:.2f}**"
    speed = f"{one['tokens_per_second']:,.0f} | {mfu} | {one['peak_memory_gb']:.2f}"
    return f"| {title} | {speed} | {ratio} | {one['step_seconds'] * 1e3:,.1f} | {', '.join(notes)} |"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop in this time; default: at the end")
    parser.add_argument("--only", default="", help="regular expression of names of cases; default: all")
    parser.add_argument("--retry", action="store_true", help="make cases again that failed, before the missing ones")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and end")
    parser.add_argument("--cpu", action="store_true", help="use the CPU, which shows only that everything runs")
    parser.add_argument("--tiny", action="store_true", help="models of two layers and a few words")
    parser.add_argument("--estimate", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Make the cases that are missing; 0 if none of all has failed."""
    began, options = time.monotonic(), parse()
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    settings = Settings(options.out.resolve(), options.cpu, options.tiny, began + 60.0 * options.minutes)
    settings.out.mkdir(parents=True, exist_ok=True)
    if options.cpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    bench = Bench(settings)
    if options.estimate:
        estimate(bench)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; started again, the missing cases are made"))
    return run(bench, cases, is_retry=options.retry)


def run(bench: Bench, cases: list[Case], *, is_retry: bool) -> int:
    """Make the cases that are missing, and write both files after each."""
    path, about = bench.out / "gpu.json", machine(bench.settings)
    kept = json.loads(path.read_text()) if path.exists() else {"machine": about, "cases": {}}
    if kept["machine"]["card"] != about["card"]:
        print(f"error: {path} has results of {kept['machine']['card']}, this is {about['card']}: give another --out")
        return 2
    made: dict[str, Any] = kept["cases"]
    failed = [case for case in cases if is_retry and made.get(case.name, {}).get("status") not in (None, *GOOD)]
    missing = [*failed, *(case for case in cases if case.name not in made)]

    def write() -> None:
        order = [case.name for case in all_cases() if case.name in made]
        results = {name: made[name] for name in order}
        estimates = bench.out / "estimates.json"
        write_text(path, json.dumps({"machine": about, "cases": results}, indent=1))
        predicted = json.loads(estimates.read_text()) if estimates.exists() else {}
        write_text(bench.out / "gpu.md", tables(results, about, predicted))

    def keep(name: str, result: dict[str, Any]) -> None:
        made[name] = result
        print(f"{name}: {result['status']}{speed_text(result)}, {result.get('seconds', 0):.0f} s", flush=True)
        write()

    bench.stand_by()
    try:
        words = prepare(bench)
        checks = [case for case in missing if not case.name.startswith("speed ")]
        make_cases(bench, checks, keep)
        for build in words:
            bench.begin(600.0)
            bench.wait(build, bench.out / "prepare.txt")
        make_cases(bench, [case for case in missing if case not in checks], keep)
        print("all cases are made")
    except TimeUpError:
        left = sum(case.name not in made for case in cases)
        print(f"the time is up; {left} of {len(cases)} cases are left: start it again")
    finally:
        bench.close()
        write()
    print((bench.out / "gpu.md").read_text())
    return 0 if all(one["status"] in GOOD for one in made.values()) else 1


def speed_text(result: dict[str, Any]) -> str:
    return f", {result['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in result else ""


if __name__ == "__main__":
    sys.exit(main())

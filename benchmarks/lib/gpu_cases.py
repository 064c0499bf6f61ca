"""Check and measure dist_mem on a GPU, the cases that tell most first; see benchmarks/gpu.sh.

Results are written after every case: OUT/gpu.json, and OUT/gpu.md as tables. A case that the end of the time
interrupts leaves no result, and is the first of the next call. Cases of a group share a process, so that torch and CUDA
start once; after a case that ends it, the next ones have a new process.
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
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lib import gpu_kernels, gpu_numbers, gpu_peers
from lib.common import load
from lib.gpu_bench import Bench, FailedError, Settings, TimeUpError, build_words
from lib.gpu_models import TINY_VOCAB, Training, trainings
from lib.gpu_page import tables
from lib.gpu_runs import TWO, evaluated, repeated, resumed, two_ranks, zero_stage

from dist_mem.runtime.devices import device_named, gpu_of
from dist_mem.runtime.files import write_text
from dist_mem.runtime.versions import code_versions
from dist_mem.tracking.provenance import running_commit

Make = Callable[[Bench], dict[str, Any]]
GOOD = ("passed", "done", "not installed", "needs a GPU")
LEAST_SECONDS = 10.0  # that must be left to begin a case
SMALL_TOKENS = 20_000
MOST_COUNTING = 120.0  # seconds for which the end waits for the floors of the last models
CACHES, MOST_CACHES = "caches.tar.gz", 16 * 2**20  # what comes back from a rented machine may have a limit


class Case(NamedTuple):
    """What is checked or measured, and how long it may take."""

    name: str
    seconds: float
    group: str  # cases in a row of one group share a process
    make: Make | None = None  # in processes of its own


def all_cases() -> list[Case]:
    """Return the cases in the order in which they are made: numbers, kernels, peers, models; runs between them."""
    numbers = [Case(name, 120.0, "numbers") for name in gpu_numbers.names()]
    kernels = [Case(name, 180.0, "kernels") for name in gpu_kernels.names()]
    peers = [Case(name, 120.0, "peers") for name in gpu_peers.names()]
    models = [
        Case(each.name, 300.0 if each.is_compiled else 120.0, "models", partial(_trained, training=each))
        for each in trainings()
    ]
    first = next(number for number, each in enumerate(trainings()) if each.is_compiled)
    return [*numbers, *kernels, *peers, *models[:first], *_runs(), *models[first:]]


def _runs() -> list[Case]:
    stages = [f"zero {stage}" for stage in range(4)]
    runs: list[tuple[str, Callable[[Bench, str], dict[str, Any]]]] = [
        *((name, zero_stage) for name in stages),
        *((f"{TWO}{stage}", two_ranks) for stage in (1, 2, 3)),
        ("repeat", repeated),
        ("resume after kill -9", resumed),
        ("evaluation on the device and the CPU", evaluated),
        ("zero 2 compiled", zero_stage),
    ]
    return [_run(name, make) for name, make in runs]


def _run(name: str, make: Callable[[Bench, str], dict[str, Any]]) -> Case:
    return Case(name, 300.0, "runs", lambda bench: make(bench, name))  # the first compiles DeepSpeed's operators


def make_cases(bench: Bench, missing: list[Case], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Make the cases in order and keep each result. Raises TimeUpError when the time of this call is up."""
    for _, cases in groupby(missing, key=lambda case: (case.group, case.make is None)):
        together = list(cases)
        if together[0].make is None:
            _make_together(bench, together, keep)
        for case in together:
            if case.make is not None:
                _make_alone(bench, case, case.make, keep)


def _make_alone(bench: Bench, case: Case, make: Make, keep: Callable[[str, dict[str, Any]], None]) -> None:
    began = time.monotonic()
    _require_time(bench)
    bench.begin(case.seconds)
    try:
        result = make(bench)
    except FailedError as error:
        result = {"status": error.status, "output": error.output}
    finally:
        bench.kill()
    keep(case.name, {**result, "seconds": round(time.monotonic() - began, 1)})


def _require_time(bench: Bench) -> None:
    if time.monotonic() > bench.settings.deadline - LEAST_SECONDS:
        raise TimeUpError


def _make_together(bench: Bench, cases: list[Case], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Make the cases in one process, and in a new one after a case that ended it."""
    while cases:
        _require_time(bench)
        lines = _begin(bench, [case.name for case in cases])
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


def _trained(bench: Bench, training: Training) -> dict[str, Any]:
    """Measure a training in a process of its own: the hooks of DeepSpeed keep every engine of a process alive.

    While the GPU's memory is too small, half of the lanes are computed at once.
    """
    lanes: int | None = None
    while True:
        result = _next_result(bench, _begin(bench, [training.name], micro_lanes=lanes))
        bench.kill()
        whole = lanes or training.configuration(tiny=bench.settings.is_tiny).train.micro_batch_size
        if result["status"] != "out of memory" or whole == 1:
            return {**{key: value for key, value in result.items() if key != "case"}, "micro_lanes": lanes}
        lanes = whole // 2


def _begin(bench: Bench, names: list[str], **more: Any) -> queue.Queue[str]:
    """Let a process measure these cases, and return its lines; an empty one is the last."""
    worker = bench.worker({"cases": names, "device": bench.device, "tiny": bench.settings.is_tiny, **more})
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_lines, args=(worker, lines), daemon=True).start()
    return lines


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
    """Make the random words of the small runs; start the doctor, and the counts, beside the first cases."""
    with (bench.out / "prepare.txt").open("a") as stream:
        small = build_words(bench.out / "data" / "tiny", TINY_VOCAB - 1, SMALL_TOKENS)
        subprocess.run(small, check=True, stdout=subprocess.DEVNULL, stderr=stream)
        with (bench.out / "doctor.txt").open("w") as report:
            doctor = subprocess.Popen([sys.executable, "-m", "dist_mem", "doctor"], stdout=report, stderr=report)
        flags = [
            name for name, given in (("--tiny", bench.settings.is_tiny), ("--cpu", bench.settings.is_cpu)) if given
        ]
        counts = [sys.executable, "-m", "lib.gpu_cases", "--count", "--out", str(bench.out), *flags]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return [doctor, subprocess.Popen(counts, stdout=stream, stderr=stream, env=environment)]


def count(out: Path, card_name: str, *, tiny: bool) -> None:
    """Write memory, operations, bytes and floor of every model whose speed is measured to OUT/counted.json."""
    from dist_mem.estimate.counting import count_micro_batch, flops_per_token
    from dist_mem.estimate.memory import update_parts
    from dist_mem.estimate.step_time import step_time
    from dist_mem.estimate.zero import job_of, sizes_of
    from dist_mem.nn.layers import DTYPES

    device, path = gpu_of(card_name) or device_named("h100"), out / "counted.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for training in trainings():
        if training.name in found or training.is_compiled:  # as without compilation
            continue
        config, vocab = training.configuration(tiny=tiny), TINY_VOCAB if tiny else training.vocab
        job = job_of(config, vocab, world_size=1, on_gpu=True)
        sizes = sizes_of(job.spec, DTYPES[config.train.precision], job.optimizer)
        counted = count_micro_batch(job.spec)
        time = step_time(job, sizes, counted, device, gpus_per_node=1)
        groups = config.train.global_batch_size // config.train.micro_batch_size
        parts = update_parts(job, sizes, counted)
        found[training.name] = {
            "memory": sum(part.num_bytes for part in parts),
            "flops_per_token": flops_per_token(job.spec).training,
            "tera_operations": groups * sum(number * work.flops for number, work in counted.kernels) / 1e12,
            "gigabytes": groups * sum(number * work.num_bytes for number, work in counted.kernels) / 1e9,
            "kernels": round(groups * sum(number for number, _ in counted.kernels)),
            "floor": {"products": time.products, "streams": time.streams, "update": time.update, **time.fused},
        }
        write_text(path, json.dumps(found, indent=1))


def unpack_caches(file: Path, folder: Path) -> None:
    """Unpack compiled kernels of an earlier call; another version of torch, Triton or Python does not use them."""
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")


def pack_caches(bench: Bench) -> None:
    """Keep the compiled kernels in one file, for the next call on a fresh machine."""
    path = bench.out / CACHES
    with tarfile.open(path, "w:gz") as archive:
        archive.add(bench.out / "cache", arcname=".")
    size = path.stat().st_size
    if size > MOST_CACHES:
        path.unlink()
    print(f"compiled kernels: {path if path.exists() else 'too large to keep'}, {size / 2**20:.1f} MiB")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop in this time; default: at the end")
    parser.add_argument("--only", default="", help="regular expression of names of cases; default: all")
    parser.add_argument("--retry", action="store_true", help="make cases again that failed, before the missing ones")
    parser.add_argument("--caches", type=Path, help=f"{CACHES} of an earlier call: compiled kernels")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and end")
    parser.add_argument("--cpu", action="store_true", help="use the CPU, which shows only that everything runs")
    parser.add_argument("--tiny", action="store_true", help="models of two layers and a few words")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
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
    if options.count:
        count(settings.out, card(settings), tiny=options.tiny)
        return 0
    for variable, name in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        folder = settings.out / "cache" / name
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(variable, str(folder))
    if options.caches:
        unpack_caches(options.caches, settings.out / "cache")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; started again, the missing cases are made"))
    return run(Bench(settings), cases, is_retry=options.retry)


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
        results = {case.name: made[case.name] for case in all_cases() if case.name in made}
        counts = bench.out / "counted.json"
        write_text(path, json.dumps({"machine": about, "cases": results}, indent=1))
        write_text(
            bench.out / "gpu.md", tables(results, about, json.loads(counts.read_text()) if counts.exists() else {})
        )

    def keep(name: str, result: dict[str, Any]) -> None:
        made[name] = result
        print(f"{name}: {result['status']}{_measured(result)}, {result.get('seconds', 0):.0f} s", flush=True)
        write()

    bench.stand_by()
    beside = prepare(bench)
    try:
        make_cases(bench, missing, keep)
        print("all cases are made")
        for process in beside:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(MOST_COUNTING, bench.settings.deadline - time.monotonic())))
    except TimeUpError:
        left = sum(case.name not in made for case in cases)
        print(f"the time is up; {left} of {len(cases)} cases are left: start it again")
    finally:
        for process in beside:
            process.kill()
        bench.close()
        write()
    pack_caches(bench)
    print((bench.out / "gpu.md").read_text())
    return 0 if all(one["status"] in GOOD for one in made.values()) else 1


def _measured(result: dict[str, Any]) -> str:
    if "tokens_per_second" in result:
        return f", {result['tokens_per_second']:,.0f} tokens/s"
    return f", {result['both_ms']:.2f} ms" if "both_ms" in result else ""


if __name__ == "__main__":
    sys.exit(main())

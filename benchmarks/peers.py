"""Compare the training speed of every memory with x-transformers and with another checkout, in one interleaved run.

    python benchmarks/peers.py --json peers.json
    python benchmarks/peers.py --baseline /tmp/before --cases transformer_xl --threads 1 --clock processor_seconds

x-transformers is installed beside the environment, and found by PYTHONPATH=/tmp/peers:

    pip install --target /tmp/peers --no-deps x-transformers einx frozendict loguru torch-einops-utils

Every version has a process of its own, with its own allocator; one of them works at a time. A round runs forward and
backward of every case in every version once, without dropout and optimizer, at the sizes of memory.py; medians over the
rounds are printed. Without x-transformers, only our own versions are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib.common import ROOT, arguments_of, load
from lib.peer_models import PEERS
from lib.speed import DTYPES, RUN, SIZES, memories

Case = tuple[str, str, str]  # version, memory or peer, dtype


class Worker:
    """A process that runs steps of one version."""

    def __init__(self, checkout: Path, arguments: argparse.Namespace, *, keeps_heap: bool) -> None:
        sizes = {name: getattr(arguments, name) for name in (*SIZES, *RUN)} | {"keeps_heap": keeps_heap}
        path = os.pathsep.join([str(checkout), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "lib" / "step_worker.py"), json.dumps(sizes)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: str, dtype: str) -> dict[str, float]:
        """Run one step and return its measurements."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"case": case, "dtype": dtype}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"the worker for {case!r} in {dtype} ended; its error stands above")
        measured: dict[str, float] = json.loads(answer)
        return measured

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def measure(workers: dict[str, Worker], cases: list[Case], rounds: int) -> dict[Case, dict[str, float]]:
    """Return the medians of all measurements over the rounds; a first, discarded round builds the models."""
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for version, name, dtype in cases:
            measured = workers[version].run(name, dtype)
            if number:
                found[version, name, dtype].append(measured)
    return {
        case: {key: statistics.median(one[key] for one in values) for key in values[0]}
        for case, values in found.items()
    }


def check_sizes(medians: dict[Case, dict[str, float]]) -> None:
    """Raise ValueError if a peer is not within 6 % of our Transformer-XL; our W_r and softmax bias make 5 %."""
    own = next((row["num_parameters"] for (_, name, _), row in medians.items() if name == "transformer_xl"), None)
    for (version, name, _), row in medians.items():
        if own is not None and version == "peers" and abs(row["num_parameters"] / own - 1) > 0.06:
            raise ValueError(f"{name} has {row['num_parameters']:,.0f} parameters, transformer_xl {own:,.0f}")


def report(medians: dict[Case, dict[str, float]], tokens: int, clock: str) -> list[dict[str, Any]]:
    """Return one row per case; `times_baseline` and `times_best_peer` are ratios of speeds in the same dtype."""
    rows = []
    for (version, name, dtype), median in medians.items():
        row = {"version": version, "case": name, "dtype": dtype, "tokens_per_second": tokens / median[clock]}
        row |= median
        before = medians.get(("baseline", name, dtype))
        if version == "here" and before is not None:
            row["times_baseline"] = before[clock] / median[clock]
        of_peers = [one[clock] for (who, _, kind), one in medians.items() if who == "peers" and kind == dtype]
        if version != "peers" and of_peers:
            row["times_best_peer"] = min(of_peers) / median[clock]
        rows.append(row)
    return rows


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = arguments_of(__doc__, **SIZES, **RUN)
    parser.add_argument("--baseline", type=Path, help="another checkout of dist_mem to compare with")
    parser.add_argument("--cases", nargs="+", default=list(memories(1)), help="memories, default: all")
    parser.add_argument("--baseline-cases", nargs="+", help="those that the other checkout has, default: --cases")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    clock = "processor_seconds for a busy machine, with --threads 1; default: %(default)s"
    parser.add_argument("--clock", choices=["seconds", "processor_seconds"], default="seconds", help=clock)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()

    workers = {"here": Worker(ROOT, arguments, keeps_heap=True)}
    if arguments.baseline:
        workers["baseline"] = Worker(arguments.baseline.absolute(), arguments, keeps_heap=True)
    has = {"here": arguments.cases, "baseline": arguments.baseline_cases or arguments.cases}
    cases = [
        (version, name, dtype)
        for dtype in arguments.dtypes
        for name in arguments.cases
        for version in workers
        if name in has[version]
    ]
    if find_spec("x_transformers"):
        workers["peers"] = Worker(ROOT, arguments, keeps_heap=False)
        cases += [("peers", name, dtype) for dtype in arguments.dtypes for name in PEERS]
    else:
        print("x-transformers is not installed: no peers")
    medians = measure(workers, cases, arguments.rounds)
    for worker in workers.values():
        worker.close()
    check_sizes(medians)

    rows = report(medians, arguments.lanes * arguments.seg_len, arguments.clock)
    print(f"{'version':<9}{'case':<40}{'dtype':<6}{'tokens/s':>9}{'ms/step':>9}{'faults':>9}{'peak MiB':>9}  ratios")
    for row in rows:
        ratios = ", ".join(f"{row[key]:.2f} {key[6:]}" for key in ("times_baseline", "times_best_peer") if key in row)
        print(
            f"{row['version']:<9}{row['case']:<40}{row['dtype']:<6}{row['tokens_per_second']:>9,.0f}"
            f"{row[arguments.clock] * 1e3:>9.1f}{row['faults']:>9,.0f}{row['peak_bytes'] / 2**20:>9,.0f}  {ratios}"
        )
    summary = {"rounds": arguments.rounds, "threads": arguments.threads, "clock": arguments.clock, "machine": load()}
    print(f"medians of {arguments.rounds} rounds, {arguments.threads} threads, {arguments.clock}, {load()}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

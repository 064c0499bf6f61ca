"""Train memory tokens at several depths of the gradient, and print the perplexity on validation of each.

    dist-mem data build sample --out data/sample
    python benchmarks/rmt_depth.py --data data/sample --out runs/rmt_depth optimizer.lr=0.004
    python benchmarks/rmt_depth.py --data data/sample --out /tmp/few --steps 4 --seeds 1 eval.max_document_len=100

The model is that of configs/demo.yaml, with segments of 50 tokens and 10 memory tokens. Depth k is windows of k + 1
segments (`train.bptt_segments`), which do not overlap: the loss of segment i of a window, i from 0, reaches i segments
back, k / 2 on average. In the paper every loss reaches k segments back, because k segments are read again in each
update. An update has 60 segments at every depth, in 60 / (k + 1) lanes, so that all depths make the same number of
updates from the same number of tokens. The first row has no memory. On WikiText-103 Bulatov et al. 2022 (table 2) have
39.05 without memory, and 30.69, 27.95, 26.62, 26.38 and 26.26 at their depths 0 to 4. Figures of the first command:
docs/log, "The depth of the gradient and memory tokens".
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.common import ROOT, load, options_and_overrides

from dist_mem.tracking.log import METRICS_FILE, read_points

SEGMENTS = 60  # of an update; a multiple of every window
METRIC = "validation/word_perplexity"


def train(
    run_dir: Path, depth: int | None, seed: int, arguments: argparse.Namespace, overrides: Sequence[str]
) -> float:
    """Train one model, or go on with it, and return its perplexity on validation; `depth` None: without memory."""
    window = 1 if depth is None else depth + 1
    lanes = SEGMENTS // window
    keys = {
        "run_dir": run_dir,
        "data.path": arguments.data,
        "train.seg_len": 50,
        "train.seed": seed,
        "train.steps": arguments.steps,
        "train.segments_per_update": window,
        "train.bptt_segments": window,
        "train.global_batch_size": lanes,
        "train.micro_batch_size": lanes,
        "schedule.warmup_steps": min(100, arguments.steps // 8),
        "eval.every": arguments.steps,
        "eval.figures": "false",
        "tracking.mlflow": "false",
        "checkpoint.every": arguments.steps,
    }
    memory = "none" if depth is None else "rmt"
    command = [sys.executable, "-m", "dist_mem", "train", str(ROOT / "configs" / "demo.yaml"), f"memory/{memory}.yaml"]
    command += [*(f"{name}={value}" for name, value in keys.items()), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    points = [point.metrics for point in read_points(run_dir / METRICS_FILE)]
    return float([point[METRIC] for point in points if METRIC in point][-1])


def main() -> None:
    """Train every depth with every seed; print a row a depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a dataset of text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; finished ones are not repeated")
    parser.add_argument("--steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; default: %(default)s")
    parser.add_argument("--depths", type=int, nargs="+", default=list(range(5)), choices=range(5), help="default: all")
    options, overrides = options_and_overrides(sys.argv[1:])
    arguments = parser.parse_args(options)
    print(f"{load()}; {arguments.steps} steps of {SEGMENTS} segments of 50 tokens")
    print("depth  perplexity on validation: mean, standard deviation, every seed")
    for depth in (None, *arguments.depths):
        name = "none" if depth is None else str(depth)
        found = [
            train(arguments.out / f"{name}-{seed}", depth, seed, arguments, overrides)
            for seed in range(arguments.seeds)
        ]
        deviation = statistics.stdev(found) if len(found) > 1 else math.nan
        each = " ".join(f"{value:.2f}" for value in found)
        print(f"{name:>5}  {statistics.mean(found):8.2f} {deviation:6.2f}   {each}", flush=True)


if __name__ == "__main__":
    main()

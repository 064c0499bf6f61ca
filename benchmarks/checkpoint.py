"""Measure the seconds of saving and restoring, compared with torch.save, torch.load and plain writes of the same bytes.

    python benchmarks/checkpoint.py                        # about three minutes, and 2 GB of disk while it runs
    python benchmarks/checkpoint.py --ranks 1 --folder /scratch

The model is a Transformer-XL of 23 million parameters under ZeRO-2 with AdamW in fp32 on the sample library, with one
CPU thread per rank. One run measures everything in turn, round after round, and prints medians. The ranks work at the
same time, and the slowest counts. "Plain" writes every rank's share of the same tensors, flushed to disk as a
checkpoint is, without hashing, verifying or committing. All files are read back from the operating system's cache.
Training continues during a save in the background: its cost is the stall, and the slower steps meanwhile.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.common import ROOT, arguments_of, build_sample, load, output_of_rank0, start_ranks

from dist_mem.config import changed

OPTIONS = [
    str(ROOT / "configs" / "demo.yaml"),
    *("model.num_layers=3", "model.d_model=736", "model.num_heads=8", "model.d_inner=2944", "model.init_std=0.02"),
    *(
        "train.precision=fp32",
        "train.threads=1",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "schedule.warmup_steps=0",
    ),
    *("eval.every=null", "checkpoint.every=null", "tracking.mlflow=false", "tracking.every=1"),
]
CHUNK = bytes(1 << 20)
STEPS = 6  # between two saves


def options(data: Path, run_dir: Path, num_steps: int) -> list[str]:
    return [*OPTIONS, f"data.path={data}", f"run_dir={run_dir}", f"train.steps={num_steps}"]


class Bench:
    """One rank of a job that is saved, restored and trained in turn."""

    def __init__(self, folder: Path) -> None:
        from dist_mem.config import load_config
        from dist_mem.memory import memory_options
        from dist_mem.runtime import distributed
        from dist_mem.runtime.signals import StopSignal
        from dist_mem.training.opening import open_run

        self.folder = folder
        self.distributed = distributed
        self.world = distributed.initialize(threads=1)
        config = load_config(options(folder / "data", folder / "run", 10**6), memory_options=memory_options)
        self.context, self.state = open_run(config, self.world, None, StopSignal([]))
        self.context.feed.read_first()
        self.seconds: dict[str, list[float]] = {}

    def note(self, part: str, seconds: float) -> None:
        """Add the measurement of the slowest rank."""
        self.seconds.setdefault(part, []).append(max(self.distributed.gather_objects(seconds)))

    def timed(self, part: str, work: Callable[[], Any]) -> None:
        gc.collect()
        self.distributed.gather_objects(None)
        began = time.perf_counter()
        work()
        self.note(part, time.perf_counter() - began)

    def step(self) -> float:
        """Train one step and return its seconds."""
        from dist_mem.training.agreement import Shared
        from dist_mem.training.step import train_step

        began = time.perf_counter()
        feed = self.context.feed
        shared = Shared(next_scored=feed.read_ahead())
        self.state, outcome = train_step(self.context, self.state, feed.update, feed.scored, shared)
        feed.advance(outcome.next_scored)
        return time.perf_counter() - began

    def save(self, *, background: bool) -> Any:
        """Save, and train until the checkpoint is written on all ranks."""
        self.context = replace(self.context, config=changed(self.context.config, {"checkpoint.background": background}))
        self.context.saving.run(self.state)
        saver = self.context.saving.saver
        saved, steps = saver.finished(), []
        while self.distributed.sum_over_ranks([not saved], self.world.device)[0]:
            steps.append(self.step())
            saved = saved or saver.finished()
        if background:
            self.note("save in the background: stall", saved[0].stall_seconds)
            self.note("save in the background: until it is on disk", saved[0].seconds)
            self.note("a step beside it", statistics.median(steps))
        else:
            self.note("save while training waits", saved[0].stall_seconds)
        return saved[0]

    def plain(self, content: dict[str, Any]) -> None:
        """Write and read the same tensors with torch alone, and write as many zeros."""
        import torch

        from dist_mem.runtime.files import fsync_path

        path = self.folder / f"plain-{self.world.rank}"

        def torch_save() -> None:
            torch.save(content, path)
            fsync_path(path)

        def write_zeros() -> None:
            with path.open("wb") as file:
                for _ in range(sum(tensor.nbytes for tensor in content.values()) // len(CHUNK)):
                    file.write(CHUNK)
                file.flush()
                os.fsync(file.fileno())

        self.timed("plain torch.save", torch_save)
        self.timed("plain torch.load", lambda: torch.load(path, weights_only=True))
        path.unlink()
        self.timed("plain writing of zeros", write_zeros)
        path.unlink()

    def restore(self) -> None:
        """Verify and read the newest checkpoint."""
        from dist_mem.checkpoint.resume_choice import AUTO, choose_checkpoint
        from dist_mem.training.resume import load_checkpoint

        context = self.context
        choice = choose_checkpoint(AUTO, context.run_dir, self.world)
        assert choice is not None
        self.state = load_checkpoint(
            choice, context.config, context.config, self.world, engine=context.engine, lane_ids=context.feed.lane_ids
        )

    def round(self) -> Any:
        """Measure everything once."""
        from safetensors.torch import load_file

        for _ in range(STEPS):
            self.note("a step alone", self.step())
        beside = self.save(background=True)
        self.step()
        saved = self.save(background=False)
        files = saved.written.path.glob(f"*/rank-{self.world.rank:05d}.safetensors")
        self.plain({f"{path}/{name}": tensor for path in files for name, tensor in load_file(path).items()})
        self.timed("verify and restore", self.restore)
        self.context.feed.restart(self.state.cursors, self.state.step)
        self.context.feed.read_first()
        if self.world.rank == 0:
            for path in (beside.written.path, saved.written.path):
                shutil.rmtree(path)
        return saved


def measure_rank(folder: Path, num_rounds: int) -> None:
    """Run all rounds in this process, which is one rank; rank 0 prints all seconds as JSON."""
    bench = Bench(folder)
    bench.step()  # creates the optimizer state
    saved = [bench.round() for _ in range(num_rounds)][-1]
    bench.context.feed.close()
    bench.context.saving.saver.close()
    if bench.world.rank == 0:
        written = saved.written
        what = f"{written.num_bytes:,} bytes, {written.num_files} files, {written.num_fsyncs} fsyncs"
        print(json.dumps({"seconds": bench.seconds, "num_bytes": written.num_bytes, "what": what}))
    bench.distributed.shut_down(agreed=True)


def seconds_to_step(step: int, data: Path, run_dir: Path, num_ranks: int) -> float:
    """Return the seconds from the start of a job's processes to the end of its last step, `step`, which it saves."""
    metrics = run_dir / "metrics.jsonl"
    began = time.time()
    command = [sys.executable, "-m", "dist_mem", "train", *options(data, run_dir, step)]
    processes = start_ranks(command, num_ranks)
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if processes[0].poll() is not None:
            break
        time.sleep(0.01)
    seconds = time.time() - began
    output_of_rank0(processes)
    return seconds


def main() -> None:
    """Print the table."""
    parser = arguments_of(__doc__, ranks=2, rounds=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        build_sample(folder / "data")
        command = [sys.executable, __file__, "--rank", str(folder), str(arguments.rounds)]
        found = json.loads(output_of_rank0(start_ranks(command, arguments.ranks)).splitlines()[-1])
        starts: dict[str, list[float]] = {"fresh start to the first step": [], "restart to the first step": []}
        for number in range(min(arguments.rounds, 3)):
            for step, seconds in enumerate(starts.values(), start=1):
                seconds.append(seconds_to_step(step, folder / "data", folder / f"start-{number}", arguments.ranks))
    print(f"{arguments.ranks} ranks, {load()}, {arguments.rounds} rounds")
    print(found["what"])
    print(f"{'seconds':<48}{'median':>8}{'least':>8}{'most':>8}{'MB/s':>8}")
    for part, seconds in (found["seconds"] | starts).items():
        median = statistics.median(seconds)
        rate = "" if "step" in part or "stall" in part else f"{found['num_bytes'] / median / 1e6:,.0f}"
        print(f"{part:<48}{median:>8.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{rate:>8}")
    stall, waited = (
        statistics.median(found["seconds"][part])
        for part in ("save in the background: stall", "save while training waits")
    )
    print(f"stall of a save in the background: {stall / waited:.0%} of one that training waits for")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure_rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()

"""Compare the memory that `dist-mem estimate` predicts with the memory that a training takes on this machine.

    python benchmarks/estimate.py  # every memory, fp32 and bf16: five minutes on two cores
    python benchmarks/estimate.py --cases long stages  # T = M = 1,024; ZeRO stages on two ranks
    python benchmarks/estimate.py --cases windows  # gradients through 1, 2 and 4 segments
    python benchmarks/estimate.py model.num_layers=8 train.micro_batch_size=2
    python benchmarks/estimate.py model.attention=chunked --cases long  # overrides come before --cases
    python benchmarks/estimate.py --published  # tokens/s of published runs beside the predicted ones

Each case is a training of its own process (or two ranks): DeepSpeed, three updates of full segments by the training
loop's own step. "Allocated" is the highest total of torch's CPU allocator in the third update, as torch's profiler
records every allocation and release: on a GPU it would be `torch.cuda.max_memory_allocated`. "Resident" is the highest
resident set of a second process without profiler, less that before the model was built; it also counts what libraries
and the C allocator keep, and not the pages that nothing has touched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from lib.common import load, options_and_overrides, output_of_rank0, resident, start_ranks
from lib.plan_cases import BASE, VOCAB_SIZE, cases, published

from dist_mem.block import model_spec


def print_published() -> None:
    """Print the predictions beside the published figures."""
    from dist_mem.config import load_config
    from dist_mem.estimate.job_estimate import estimate_job
    from dist_mem.estimate.search import Cluster
    from dist_mem.memory import memory_options
    from dist_mem.runtime.devices import device_named

    print(
        f"{'run':<40}{'published':>12}{'predicted':>12}{'ratio':>7}{'MFU':>7}{'products':>10}{'memory':>10}   tokens/s"
    )
    for name, (device_name, num_gpus, speed, vocab_size, overrides) in published().items():
        config = load_config([*BASE, *overrides], memory_options=memory_options)
        device = device_named(device_name)
        if "TF32" in name:
            device = device._replace(flops={**device.flops, "fp32": device.flops["tf32"]})
        job = estimate_job(config, vocab_size, Cluster(device, num_gpus, gpus_per_node=8), disk_rate=1e9)
        predicted = job.tokens / job.time.total
        shares = f"{job.mfu:>7.1%}{job.time.products / job.time.total:>10.1%}{job.num_bytes / 2**30:>6.1f} GiB"
        print(f"{name:<40}{speed:>12,.0f}{predicted:>12,.0f}{predicted / speed:>7.2f}{shares}", flush=True)


def measure_rank(overrides: list[str], *, allocations: bool) -> None:
    """Train three updates in this process, which is one rank; rank 0 prints its peak in the last one, in bytes."""
    import torch
    from lib.updates import update_of

    from dist_mem.config import deepspeed_block, load_config
    from dist_mem.data.batch_plan import batch_plan
    from dist_mem.engine.engine import Engine
    from dist_mem.memory import memory_options
    from dist_mem.model import MemoryLM
    from dist_mem.runtime import distributed
    from dist_mem.training.divergence import Divergence
    from dist_mem.training.state import TrainState
    from dist_mem.training.step import StepContext, train_step

    config = load_config(overrides, memory_options=memory_options)
    world = distributed.initialize(threads=1)
    batch = batch_plan(config.train, world.size)
    lanes = range(world.rank * batch.lanes_per_rank, (world.rank + 1) * batch.lanes_per_rank)
    before = resident("VmRSS")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    if allocations:
        profiler.start()
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, VOCAB_SIZE))
    engine = Engine(
        model,
        config.train,
        config.optimizer,
        deepspeed_block(config),
        world_size=world.size,
        accumulation=batch.backwards,
    )
    engine.train()
    context = StepContext(config, world, engine, Divergence(config.divergence), total_steps=100)
    groups = torch.tensor(lanes).split(config.train.micro_batch_size)
    cursors = torch.zeros(len(lanes), 3, dtype=torch.int64)
    state = TrainState(0, [engine.init_state(group) for group in groups], cursors)
    scored = [
        int(count) for count in distributed.sum_over_ranks(update_of(config, lanes, VOCAB_SIZE).scored, world.device)
    ]
    for step in range(3):
        if step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident set
        with torch.profiler.record_function(f"update {step}"):
            state, _ = train_step(context, state, update_of(config, lanes, VOCAB_SIZE), scored)
    peak = resident("VmHWM") - before
    if allocations:
        profiler.stop()
        peak = allocated(profiler, since="update 2")
    if world.rank == 0:
        print(json.dumps(peak))
    distributed.shut_down(agreed=True)


def allocated(profiler: Any, *, since: str) -> int:
    """Return the highest total of all allocations from the event `since` on."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == since)
    total = peak = 0
    for event in events:
        if event.name() == "[memory]":
            total += event.nbytes()
            if event.start_ns() >= begin:
                peak = max(peak, total)
    return peak


def measured(num_ranks: int, overrides: list[str], instrument: str) -> int:
    """Return the peak of rank 0 in bytes, of a job of its own processes."""
    command = [sys.executable, __file__, "--instrument", instrument, *overrides]
    return int(json.loads(output_of_rank0(start_ranks(command, num_ranks)).splitlines()[-1]))


def predicted(num_ranks: int, overrides: list[str]) -> int:
    """Return the prediction for a rank in bytes."""
    from dist_mem.config import load_config
    from dist_mem.estimate.memory import training_parts
    from dist_mem.estimate.zero import job_of
    from dist_mem.memory import memory_options

    config = load_config(overrides, memory_options=memory_options)
    job = job_of(config, VOCAB_SIZE, world_size=num_ranks, on_gpu=False)
    return sum(part.num_bytes for part in training_parts(job, config.eval))


def main() -> None:
    """Print the table, and the same as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["memories", "long", "stages", "windows"], default=["memories"])
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--resident", action="store_true", help="also measure the resident set")
    parser.add_argument("--published", action="store_true", help="compare with published runs instead")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--instrument", choices=["allocated", "resident"], help=argparse.SUPPRESS)
    options, overrides = options_and_overrides(sys.argv[1:])
    arguments, files = parser.parse_known_args(options)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if arguments.instrument:
        measure_rank([*files, *overrides], allocations=arguments.instrument == "allocated")
        return
    if arguments.published:
        print_published()
        return
    rows = []
    print(f"{'case':<48}{'predicted':>11}{'allocated':>11}{'ratio':>7}{'resident':>11}   MiB; {load()}")
    for group in arguments.cases:
        for name, (num_ranks, keys) in cases(group).items():
            if arguments.only not in name:
                continue
            settings = [*BASE, *keys, *overrides]
            row: dict[str, Any] = {
                "case": name,
                "predicted": predicted(num_ranks, settings),
                "allocated": measured(num_ranks, settings, "allocated"),
                "resident": measured(num_ranks, settings, "resident") if arguments.resident else None,
            }
            rows.append(row)
            in_memory = "" if row["resident"] is None else f"{row['resident'] / 2**20:>11,.0f}"
            ratio = row["predicted"] / row["allocated"]
            mebibytes = f"{row['predicted'] / 2**20:>11,.1f}{row['allocated'] / 2**20:>11,.1f}"
            print(f"{name:<48}{mebibytes}{ratio:>7.3f}{in_memory}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

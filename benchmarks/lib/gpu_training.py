"""The trainings of gpu.sh: updates of the training loop's own step with DeepSpeed, timed, and one with a profile.

Tokens are random and in memory: reading data is not part of it, and a process that has imported all starts in seconds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from lib.common import seconds
from lib.gpu_models import TINY_VOCAB, Training, trainings
from torch.profiler import ProfilerActivity, profile

from dist_mem.config import Config, change_config
from dist_mem.runtime.distributed import initialize

WARM_UPS, MOST_UPDATES, MOST_SECONDS = 4, 20, 5.0  # memories are full and allocations made; timed updates
NUM_OPERATORS = 10


def measure(name: str, *, tiny: bool, micro_lanes: int | None) -> dict[str, Any]:
    """Measure one training, the only one of this process; `micro_lanes`: another `train.micro_batch_size`."""
    training = next(each for each in trainings() if each.name == name)
    config = training.configuration(tiny=tiny)
    config = change_config(config, {"train.micro_batch_size": micro_lanes or config.train.micro_batch_size})
    return {"status": "done", **_measured(training, config, tiny=tiny)}


def _measured(training: Training, config: Config, *, tiny: bool) -> dict[str, Any]:
    from lib.updates import engine_of, step_of, update_of

    from dist_mem.engine.compiling import compile_blocks

    began = time.perf_counter()
    world = initialize(threads=1)
    on_gpu = world.device.type == "cuda"
    vocab = TINY_VOCAB if tiny else training.vocab
    engine = engine_of(config, vocab)
    compiling = None
    if training.is_compiled:
        compiling = seconds(lambda: compile_blocks(engine, config.train))
    update = update_of(config, range(config.train.global_batch_size), vocab)
    step = step_of(engine, config, world, update)
    for _ in range(WARM_UPS):
        step()
    started = time.perf_counter() - began
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 3 or (len(times) < (3 if tiny else MOST_UPDATES) and sum(times) < MOST_SECONDS):
        times.append(seconds(step))
    median = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
    busy, operators = costliest(profiler, on_gpu=on_gpu)
    return {
        "tokens_per_second": sum(update.scored) / median,
        "step_seconds": median,
        "peak_memory_gb": peak,
        "busy_share": busy / median if on_gpu else None,  # of the GPU's time; the rest waits for launches and the host
        "compile_seconds": compiling,
        "start_seconds": started,
        "operators": operators,
    }


def costliest(profiler: profile, *, on_gpu: bool) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds of all kernels (on a CPU: operators), and the costliest with milliseconds and calls."""
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [row for row in profiler.key_averages() if not row.is_user_annotation]  # spans, whose kernels have rows
    rows = sorted(found, key=lambda row: -getattr(row, time_of))
    total = sum(getattr(row, time_of) for row in rows) / 1e6
    return total, [
        {"name": row.key[:90], "ms": round(getattr(row, time_of) / 1e3, 3), "calls": row.count}
        for row in rows[:NUM_OPERATORS]
    ]

"""Run training steps on request: one JSON line in, one out. peers.py starts a worker for every version it compares.

Requests: {"case": name, "dtype": "fp32"} of a memory or of a peer. The first request for a case builds its model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lib.peer_models import PEERS, peer_step
from lib.speed import DTYPES, Step, memories, training_step


def build(request: dict[str, str], arguments: argparse.Namespace) -> tuple[Step, int]:
    """Return the step of a case and the number of parameters of its model."""
    dtype = DTYPES[request["dtype"]]
    if request["case"] in PEERS:
        step, model = peer_step(PEERS[request["case"]], dtype, arguments)
    else:
        memory = memories(arguments.mem_len)[request["case"]]
        step, model = training_step(memory, dtype, arguments, torch.device("cpu"))
    return step, sum(parameter.numel() for parameter in model.parameters())


def measure(step: Step) -> dict[str, float]:
    """Return wall and processor seconds, minor page faults, and the peak of resident memory in bytes of one step."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began, worked = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), time.process_time()
    step()
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"seconds": seconds, "processor_seconds": processor, "faults": faults, "peak_bytes": peak}


def keep_heap_if_known() -> None:
    """Configure the allocator as `dist-mem` does; a baseline may be older than that."""
    try:
        from dist_mem.runtime.machine_memory import keep_heap
    except ImportError:
        return
    keep_heap()


def main() -> None:
    """Answer requests until the input ends."""
    arguments = argparse.Namespace(**json.loads(sys.argv[1]))
    if arguments.keeps_heap:
        keep_heap_if_known()
    torch.set_num_threads(arguments.threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    built: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        key = request["case"], request["dtype"]
        if key not in built:
            built[key] = build(request, arguments)
        step, num_parameters = built[key]
        print(json.dumps({**measure(step), "num_parameters": num_parameters}), file=answers)


if __name__ == "__main__":
    main()

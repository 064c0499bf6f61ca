"""Measure what a window of K segments (`train.bptt_segments`) takes, kept whole and computed again by segments.

    python benchmarks/windows.py  # six memories, K = 1 to 64: half an hour on one core
    python benchmarks/windows.py --memories linear --lengths 1024 --kept segments
    python benchmarks/windows.py --tiny --lengths 2

Each case is a process of its own: a forward and a backward of one window, the second of two, without DeepSpeed. "Peak"
is the highest resident set, less that before the first window, when gradients were allocated already; the C allocator
gives freed memory back (MALLOC_MMAP_THRESHOLD_). "States" is K times the bytes of a state.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.common import load, resident

VOCAB = 8_192
MEMORIES: dict[str, list[str]] = {
    "infini": ["memory.kind=infini"],
    "linear": ["configs/memory/gated_deltanet.yaml"],
    "rmt": ["memory.kind=rmt"],
    "armt": ["memory.kind=armt"],
    "titans": ["memory.kind=titans"],
    "block_recurrent": ["memory.kind=block_recurrent"],
}
SIZE = ["model.num_layers=4", "model.d_model=256", "model.num_heads=4", "model.d_inner=1024", "train.seg_len=128"]
TINY = ["model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.d_inner=64", "train.seg_len=16"]


def measure_here(overrides: list[str]) -> dict[str, float]:
    """Measure one case in this process: MiB and seconds."""
    import torch

    from dist_mem.block import model_spec
    from dist_mem.config import load_config
    from dist_mem.data.batch_plan import backwards_of_window
    from dist_mem.engine import window
    from dist_mem.memory import memory_options
    from dist_mem.memory.base import named_tensors
    from dist_mem.model import MemoryLM

    torch.set_num_threads(1)
    train = load_config(overrides, memory_options=memory_options)
    torch.manual_seed(0)
    model = MemoryLM(model_spec(train, VOCAB)).train()
    lanes, num, seg_len = train.train.micro_batch_size, train.train.bptt_segments, train.train.seg_len
    tokens = torch.randint(VOCAB, (lanes, num * seg_len))
    valid_len = torch.full((lanes, num), seg_len) if num > 1 else torch.full((lanes,), seg_len)
    state = model.init_state(torch.arange(lanes), "cpu", torch.float32)
    text, run = window.Text(tokens, tokens, valid_len, [None] * num), window.PlainAutograd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resident("VmRSS")
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident set
        began = time.perf_counter()
        found = window.read(run, text, state, recomputes=backwards_of_window(train.train) > 1)
        found.backward(lambda nll, aux: nll / tokens.numel() + aux)
        seconds = time.perf_counter() - began
        del found
    states = num * sum(part.numel() * part.element_size() for part in named_tensors(state).values())
    return {"peak": (resident("VmHWM") - before) / 2**20, "states": states / 2**20, "seconds": seconds}


def main() -> None:
    """Print the table, and the same as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", nargs="+", choices=list(MEMORIES), default=list(MEMORIES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 4, 16, 64], help="K")
    parser.add_argument("--kept", nargs="+", default=["none", "segments"], help="train.activation_checkpointing")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(arguments.here)))
        return
    rows: list[dict[str, Any]] = []
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print(f"{'memory':<18}{'K':>6}  {'recomputed':<20}{'peak':>9}{'states':>9}   MiB{'seconds':>11}; {load()}")
    for name in arguments.memories:
        for length in arguments.lengths:
            for kept in arguments.kept if length > 1 else ["none"]:
                keys = [*MEMORIES[name], *(TINY if arguments.tiny else SIZE), "train.micro_batch_size=2"]
                keys += ["train.global_batch_size=2", "train.precision=fp32", "train.steps=1", "data.path=none"]
                keys += [f"train.{key}={length}" for key in ("segments_per_update", "bptt_segments")]
                command = [sys.executable, __file__, "--here", *keys, f"train.activation_checkpointing={kept}"]
                output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
                row = {"memory": name, "K": length, "recomputed": kept, **json.loads(output.splitlines()[-1])}
                rows.append(row)
                figures = f"{row['peak']:>9,.0f}{row['states']:>9,.1f}{row['seconds']:>17,.2f}"
                print(f"{name:<18}{length:>6}  {kept:<20}{figures}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

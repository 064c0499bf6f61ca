"""Measure what inspection costs: a segment read without gradient, inspected, and with one passage forgotten before it.

    python benchmarks/inspect_memory.py                      # the size of configs/demo.yaml: half a minute on two cores
    python benchmarks/inspect_memory.py --lanes 4 --seg-len 128 --mem-len 128

The memories are full. Rounds are interleaved; a ratio is the median over rounds of the time divided by that of the
plain forward. A forward without inspection has no call of it at all, so there is nothing to measure there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from lib.common import arguments_of, interleaved, load
from memory import configuration, device_seconds, memories

from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import MemoryLM

SEGMENTS = 8  # read before, so that every memory is full


@torch.no_grad()
def calls(memory: dict[str, Any], arguments: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the calls to time for one memory."""
    torch.manual_seed(0)
    model = MemoryLM(configuration(memory, arguments), arguments.vocab).to(device).eval()
    shape = (SEGMENTS + 1, arguments.lanes, arguments.seg_len)
    *before, segment = torch.randint(1, arguments.vocab, shape, device=device)
    valid_len = torch.full((arguments.lanes,), arguments.seg_len, device=device)
    state = model.init_state(torch.arange(arguments.lanes, device=device), device, torch.float32)
    inspector = Inspector(model.memories())
    with inspector:
        for tokens in before:
            state = model(tokens, tokens, valid_len, state=state).state
            inspector.commit()
    begin, end = torch.full_like(valid_len, -2 * arguments.seg_len), torch.full_like(valid_len, -arguments.seg_len)

    @torch.no_grad()
    def plain() -> Any:
        return model(segment, segment, valid_len, state=state)

    @torch.no_grad()
    def inspected() -> Any:
        with inspector:
            return model(segment, segment, valid_len, state=state)

    @torch.no_grad()
    def without_passage() -> Any:
        blocks = inspector.forget(state.blocks, begin, end)
        return model(segment, segment, valid_len, state=state._replace(blocks=blocks))

    return {"plain": plain, "inspected": inspected, "without a passage": without_passage}


def main() -> None:
    """Print the table."""
    sizes = {"num_layers": 2, "d_model": 128, "num_heads": 4, "d_head": 32, "d_inner": 256}
    run = {"seg_len": 64, "mem_len": 192, "lanes": 1, "vocab": 4096, "rounds": 30, "threads": 1}
    arguments = arguments_of(__doc__, **sizes, **run).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    print(f"{device}, {load()}; medians of {arguments.rounds} interleaved rounds")
    print(f"{'memory':<30} {'plain (ms)':>11} {'inspected':>11} {'without a passage':>19}")
    for name, memory in memories(arguments.mem_len).items():
        cases = calls(memory, arguments, device)
        times = interleaved(cases, arguments.rounds, device_seconds)
        ratios = [
            statistics.median(time / plain for time, plain in zip(times[case], times["plain"], strict=True))
            for case in ("inspected", "without a passage")
        ]
        plain = 1e3 * statistics.median(times["plain"])
        print(f"{name:<30} {plain:>11.2f} {ratios[0]:>10.2f}x {ratios[1]:>18.2f}x")


if __name__ == "__main__":
    main()

"""Measure the training speed of every memory on this machine, and the machine's matrix-product rate in the same run.

    python benchmarks/memory.py                    # 4 layers of 410, T = M = 150: under two minutes on two cores
    python benchmarks/memory.py --num-layers 2 --d-model 128 --num-heads 4 --d-head 32 --d-inner 512 --lanes 8

One process runs forward and backward on full segments with full memories, without dropout and optimizer, then one layer
of long-term memory alone. Rounds are interleaved and medians printed, so that a busy moment of the machine affects all
cases alike. FLOPs are those of dist_mem/estimate/counting.py.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from lib.common import arguments_of, interleaved, load
from lib.speed import DTYPES, RUN, SIZES, Step, configuration, device_seconds, memories, training_step

from dist_mem.block import layer_spec, model_spec
from dist_mem.estimate.counting import flops_per_token
from dist_mem.memory import build_memory
from dist_mem.memory.infinite import Infinite
from dist_mem.nn.layers import split_heads
from dist_mem.runtime.machine_memory import keep_heap


def matrix_product(dtype: torch.dtype, device: torch.device) -> tuple[Step, int]:
    """Return a square matrix product large enough to reach the machine's limit, and its FLOPs."""
    size = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right, 2 * size**3


def long_term_layer(sampling: str, dtype: torch.dtype, device: torch.device) -> Step:
    """Return forward and backward of one long-term memory layer of GPT-2's size, T = N = S = 512, one lane."""
    size = {"num_layers": 1, "d_model": 768, "num_heads": 12, "d_head": 64, "d_inner": 768, "seg_len": 512}
    block = {"kind": "infinite", "num_basis": 512, "num_samples": 512, "tau": 0.5, "sampling": sampling}
    torch.manual_seed(0)
    memory = build_memory(block, layer_spec(model_spec(configuration(block, argparse.Namespace(**size)), 1), 0)).to(
        device, dtype
    )
    assert isinstance(memory, Infinite)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    state = memory.init_state(torch.zeros(1, dtype=torch.int64), device, dtype)
    state = state._replace(
        coefficients=torch.randn_like(state.coefficients),
        num_tokens=state.num_tokens + 512,
        pending=torch.randn_like(state.pending),
        has_pending=torch.ones_like(state.has_pending),
    )
    rows = torch.randn(1, 512, 768, device=device, dtype=dtype).requires_grad_()
    counted = torch.ones(1, 512, device=device, dtype=torch.bool)

    def step() -> None:
        signal, _ = memory.append_pending(state, dtype)
        readable = memory.project_signal(signal, dtype)
        density = memory.density(split_heads(rows, 12), readable.keys)
        reading = memory.read(density, readable.values)
        (reading.float().square().mean() + memory.regulariser(density, counted)["kl"].sum()).backward()
        memory.zero_grad()

    step()
    return step


def main() -> None:
    """Print both tables."""
    arguments = arguments_of(__doc__, **SIZES, **RUN).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    keep_heap()  # as every rank on CPUs does
    products = {name: matrix_product(dtype, device) for name, dtype in DTYPES.items()}
    steps = {
        (kind, name): training_step(memory, dtype, arguments, device)
        for name, dtype in DTYPES.items()
        for kind, memory in memories(arguments.mem_len).items()
    }
    layers = {
        (sampling, name): long_term_layer(sampling, dtype, device)
        for sampling in ("linear", "sticky")
        for name, dtype in DTYPES.items()
    }
    calls: dict[Any, Step] = {name: call for name, (call, _) in products.items()}
    calls |= {case: call for case, (call, _) in steps.items()} | layers
    times = interleaved(calls, arguments.rounds, device_seconds)
    medians = {case: statistics.median(values) for case, values in times.items()}
    rates = {name: flops / medians[name] for name, (_, flops) in products.items()}

    tokens = arguments.lanes * arguments.seg_len
    print(
        f"{'memory':<30}{'dtype':<6}{'tokens/s':>9}{'ms/step':>9}{'MFLOP/token':>13}{'GFLOP/s':>9}{'of products':>13}"
    )
    blocks = memories(arguments.mem_len)
    for kind, name in steps:
        config = configuration(blocks[kind], arguments)
        flops = tokens * flops_per_token(model_spec(config, arguments.vocab), num_lanes=arguments.lanes).training
        median = medians[kind, name]
        print(
            f"{kind:<30}{name:<6}{tokens / median:>9,.0f}{median * 1e3:>9.1f}{flops / tokens / 1e6:>13.1f}"
            f"{flops / median / 1e9:>9,.0f}{flops / median / rates[name]:>13.0%}"
        )
    for sampling, name in layers:
        milliseconds = medians[sampling, name] * 1e3
        print(f"one long-term layer, T = N = S = 512, D 768, 12 heads, {sampling}, {name}: {milliseconds:.1f} ms")
    rounds = f"medians of {arguments.rounds} rounds, {arguments.threads} threads, {load()}"
    print(f"matrix products: {', '.join(f'{p} {rate / 1e9:,.0f} GFLOP/s' for p, rate in rates.items())}; {rounds}")


if __name__ == "__main__":
    main()

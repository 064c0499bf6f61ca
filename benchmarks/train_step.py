"""Training speed of every memory on this machine, beside the machine's own matrix-product rate in the same run.

    python benchmarks/train_step.py                   # the geometry of make demo, all memories, fp32 and bf16
    python benchmarks/train_step.py --d-model 410 --num-heads 10 --d-inner 2100 --seg-len 150 --lanes 4 --vocab 8192

One process, forward and backward, no optimizer; rounds are interleaved and medians are printed, so that a busy moment
of the machine hits all alike. FLOPs are what torch's counter sees in one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from dist_mem.config import Config
from dist_mem.memory import memory_kinds
from dist_mem.model import MemoryLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matrix_product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of square products that are large enough to reach the machine's limit."""
    size = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device)


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def training_step(
    kind: str, dtype: torch.dtype, arguments: argparse.Namespace, device: torch.device
) -> Callable[[], None]:
    """Forward and backward on full segments with a full memory."""
    config = OmegaConf.merge(
        OmegaConf.structured(Config),
        {
            "model": {
                "num_layers": arguments.num_layers,
                "d_model": arguments.d_model,
                "num_heads": arguments.num_heads,
                "d_inner": arguments.d_inner,
                "dropout": 0.0,
            },
            "memory": {"kind": kind} if kind == "none" else {"kind": kind, "mem_len": arguments.mem_len},
            "train": {"seg_len": arguments.seg_len},
        },
    )
    torch.manual_seed(0)
    model = MemoryLM(config, arguments.vocab).to(device, dtype)  # type: ignore[arg-type]
    shape = (arguments.lanes, arguments.seg_len)
    tokens = torch.randint(arguments.vocab, shape, device=device)
    valid_len = torch.full((arguments.lanes,), arguments.seg_len, device=device)
    state = [model.init_state(torch.arange(arguments.lanes), device, dtype)]

    def step() -> None:
        output = model(tokens, tokens, valid_len, state=state[0])
        output.nll.mean().backward()
        model.zero_grad()
        state[0] = output.state

    for _ in range(-(-arguments.mem_len // arguments.seg_len) + 2):  # fill the memory, warm up
        step()
    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"num_layers": 2, "d_model": 128, "num_heads": 4, "d_inner": 512, "seg_len": 64, "mem_len": 192}
    for name, value in {**defaults, "lanes": 8, "vocab": 1024, "rounds": 15, "threads": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    cases = [(kind, precision) for precision in DTYPES for kind in memory_kinds()]
    steps = {case: training_step(case[0], DTYPES[case[1]], arguments, device) for case in cases}
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    rates: dict[str, list[float]] = {precision: [] for precision in DTYPES}
    for _ in range(arguments.rounds):
        for precision, dtype in DTYPES.items():
            rates[precision].append(matrix_product_rate(dtype, device))
        for case in cases:
            times[case].append(seconds(steps[case], device))
    tokens = arguments.lanes * arguments.seg_len
    print(
        f"{'memory':<16}{'dtype':<7}{'tokens/s':>10}{'ms/step':>9}{'GFLOP/step':>12}{'GFLOP/s':>9}{'of products':>13}"
    )
    for kind, precision in cases:
        median = statistics.median(times[kind, precision])
        with FlopCounterMode(display=False) as counter:
            steps[kind, precision]()
        flops = counter.get_total_flops()
        share = flops / median / statistics.median(rates[precision])
        print(
            f"{kind:<16}{precision:<7}{tokens / median:>10,.0f}{median * 1e3:>9.2f}"
            f"{flops / 1e9:>12.2f}{flops / median / 1e9:>9.0f}{share:>13.0%}"
        )
    print(f"matrix products: {', '.join(f'{p} {statistics.median(r) / 1e9:,.0f} GFLOP/s' for p, r in rates.items())}")


if __name__ == "__main__":
    main()

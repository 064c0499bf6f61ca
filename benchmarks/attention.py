"""Measure the peak memory and the time of a training step by memory and back end of attention (`model.attention`).

    python benchmarks/attention.py                                   # T = M = 1,024, one lane, two layers of 512
    python benchmarks/attention.py --seg-len 256 --mem-len 256 --lanes 4

Memory: the largest number of bytes that torch's CPU allocator held during forward and backward, minus what it held
before (parameters, gradients and the lanes' memories). It is counted, so it does not depend on the machine's load.
Time: medians of interleaved rounds in one process, and their ratio to `simple`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lib.common import arguments_of, interleaved, load
from torch.profiler import ProfilerActivity, profile

from dist_mem.block import model_spec
from dist_mem.config import Config, change_config
from dist_mem.model import MemoryLM
from dist_mem.nn.attention import BACK_ENDS
from dist_mem.nn.layers import DTYPES

Step = Callable[[], Any]


def memories(mem_len: int) -> dict[str, dict[str, Any]]:
    """Return blocks of memories with M rows."""
    short = {"kind": "transformer_xl", "mem_len": mem_len}
    return {
        "causal": {"kind": "causal"},
        "transformer_xl": short,
        "lamemo": {"kind": "lamemo", "mem_len": mem_len},
        "infinite": {"kind": "infinite", "num_basis": 128, "basis_widths": [0.01, 0.05], "over": short},
    }


def training_step(memory: dict[str, Any], back_end: str, dtype: torch.dtype, arguments: argparse.Namespace) -> Step:
    """Return a function that runs forward and backward of all lanes with full memories.

    Raises:
        ValueError: the memory cannot attend by this back end.
    """
    sizes = ("num_layers", "d_model", "num_heads", "d_inner")
    model_keys = {"dropout": 0.0, "attention": back_end, **{name: getattr(arguments, name) for name in sizes}}
    keys = {"model": model_keys, "memory": memory, "train": {"seg_len": arguments.seg_len}}
    torch.manual_seed(0)
    config: Any = change_config(Config(), keys)
    model = MemoryLM(model_spec(config, arguments.vocab)).to(dtype)
    tokens = torch.randint(arguments.vocab, (arguments.lanes, arguments.seg_len))
    valid_len = torch.full((arguments.lanes,), arguments.seg_len)
    state = [model.init_state(torch.arange(arguments.lanes), "cpu", dtype)]

    def step() -> None:
        output = model(tokens, tokens, valid_len, state=state[0])
        (output.nll.mean() + sum(loss.mean() for loss in output.aux.values())).backward()
        model.zero_grad(set_to_none=False)
        state[0] = output.state

    for _ in range(1 + arguments.mem_len // arguments.seg_len):  # fill the memory, compile, allocate gradients
        step()
    return step


def peak_bytes(step: Step) -> int:
    """Return the largest number of bytes that torch's CPU allocator holds during a step, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record for each memory, precision and back end."""
    records = []
    for kind, memory in memories(arguments.mem_len).items():
        for precision in ("fp32", "bf16"):
            steps = {}
            for back_end in BACK_ENDS[1:]:
                try:
                    steps[back_end] = training_step(memory, back_end, DTYPES[precision], arguments)
                except ValueError as error:
                    print(f"{kind:<16}{precision:<6}{back_end:<9} {error}")
            times = interleaved(steps, arguments.rounds)
            medians = {back_end: statistics.median(values) for back_end, values in times.items()}
            for back_end, step in steps.items():
                records.append(
                    {
                        "memory": kind,
                        "precision": precision,
                        "back_end": back_end,
                        "peak_bytes": peak_bytes(step),
                        "seconds": medians[back_end],
                        "times_simple": medians[back_end] / medians["simple"],
                    }
                )
                print_record(records[-1])
    return records


def print_record(record: dict[str, Any]) -> None:
    print(
        f"{record['memory']:<16}{record['precision']:<6}{record['back_end']:<9}{record['peak_bytes'] / 2**20:9.1f} MiB"
        f"{1000 * record['seconds']:10.0f} ms{record['times_simple']:7.2f} x simple",
        flush=True,
    )


def main() -> None:
    """Print the table, and write it as JSON if asked to."""
    sizes = {"num_layers": 2, "d_model": 512, "num_heads": 8, "d_inner": 2048}
    run = {"seg_len": 1024, "mem_len": 1024, "lanes": 1, "vocab": 1000, "rounds": 3, "threads": 2}
    parser = arguments_of(__doc__, **sizes, **run)
    parser.add_argument("--json", type=Path, help="also write the records into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{load()} at the start")
    records = measured(arguments)
    print(f"{load()} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "records": records}, default=str, indent=1))


if __name__ == "__main__":
    main()

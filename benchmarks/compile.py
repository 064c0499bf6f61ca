"""Measure what `train.compile` costs at the start and gains in a step, under DeepSpeed.

    python benchmarks/compile.py                                             # every memory, ZeRO-2, one rank
    python benchmarks/compile.py --memories transformer_xl --stages 0 1 2 3 --ranks 2

Each case is a job of its own with an empty cache: an engine with compiled blocks and one without make updates in turn,
on the same tokens, so that a busy moment of the machine affects both. The table has the medians of their seconds, the
median and the quartiles of their ratio in a round (below 1: compiled is faster), and the seconds to compile with an
empty cache and with a full one. On CPUs each rank has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import memory as speed
import torch
from lib.common import arguments_of, interleaved, load, output_of_rank0, seconds, start_ranks

from dist_mem.block import model_spec
from dist_mem.config import change_config

CASE = "DIST_MEM_BENCHMARK_CASE"


def updates(engine: Any, arguments: argparse.Namespace) -> Callable[[], None]:
    """Return a function that makes one update of full segments on this rank's lanes."""
    lanes, seg_len = arguments.lanes, arguments.seg_len
    tokens = torch.randint(arguments.vocab, (lanes, seg_len), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(engine.device)
    valid_len = torch.full((lanes,), seg_len, device=engine.device)
    state = [engine.init_state(torch.arange(lanes))]

    def update() -> None:
        output = engine(tokens, tokens, valid_len, state=state[0])
        aux = sum(loss.mean() for loss in output.aux.values())
        engine.backward(output.nll.mean() + aux)
        engine.step(1.0)
        state[0] = output.state

    return update


def measure(case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case; every rank of its job calls this."""
    from dist_mem.engine.compiling import compile_blocks
    from dist_mem.engine.engine import Engine
    from dist_mem.engine.start import start_communication
    from dist_mem.model import MemoryLM
    from dist_mem.nn.compilation import compile_once
    from dist_mem.runtime.distributed import choose_accelerator, initialize

    choose_accelerator()
    world = initialize(threads=1)
    start_communication()
    config = speed.configuration(speed.memories(arguments.mem_len)[case["memory"]], arguments)
    config = change_config(config, {"train.precision": case["precision"], "train.micro_batch_size": arguments.lanes})
    engines = {}
    for is_compiled in (False, True):
        config = change_config(config, {"train.compile": is_compiled})
        torch.manual_seed(0)
        block = {"zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0}}
        engine = Engine(
            MemoryLM(model_spec(config, arguments.vocab)),
            config.train,
            config.optimizer,
            block,
            world_size=world.size,
            accumulation=1,
        )
        engine.train()
        engines["compiled" if is_compiled else "plain"] = engine
    compiling = partial(compile_blocks, engines["compiled"], config.train)
    starts = []
    for _ in range(2):
        torch._dynamo.reset()
        compile_once.cache_clear()
        starts.append(seconds(compiling))
    calls = {name: updates(engine, arguments) for name, engine in engines.items()}
    interleaved(calls, 3)  # fill the memories, warm up
    times = interleaved(calls, arguments.rounds)
    ratios = [one / other for one, other in zip(times["compiled"], times["plain"], strict=True)]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {
        **case,
        **{name: statistics.median(values) for name, values in times.items()},
        "ratio": statistics.quantiles(ratios, n=4),
        "empty_cache": starts[0],
        "full_cache": starts[1],
    }


def main() -> None:
    """Print one row a case, and all figures as JSON if `--json` names a file."""
    sizes = {"num_layers": 4, "d_model": 410, "num_heads": 10, "d_head": 41, "d_inner": 2100}
    run = {"seg_len": 150, "mem_len": 150, "lanes": 2, "vocab": 8192, "rounds": 9, "ranks": 1}
    parser = arguments_of(__doc__, **sizes, **run)
    kinds = list(speed.memories(1))
    parser.add_argument("--memories", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[2])
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    if CASE in os.environ:
        print(json.dumps(measure(json.loads(os.environ[CASE]), arguments)))
        return
    found = []
    print(
        f"{'memory':<30}{'dtype':<6}{'ZeRO':>5}{'plain s':>9}{'compiled s':>11}{'ratio (quartiles)':>22}{'start s':>14}"
    )
    cases = [
        (stage, kind, name)
        for stage in arguments.stages
        for kind in arguments.memories
        for name in arguments.precisions
    ]
    for stage, kind, name in cases:
        case = {"memory": kind, "precision": name, "stage": stage}
        with tempfile.TemporaryDirectory() as cache:
            os.environ |= {CASE: json.dumps(case), "TORCHINDUCTOR_CACHE_DIR": cache}
            lines = output_of_rank0(start_ranks([sys.executable, *sys.argv], arguments.ranks))
        row = json.loads(lines.splitlines()[-1]) | {"load": os.getloadavg()[0], "ranks": arguments.ranks}
        found.append(row)
        low, middle, high = row["ratio"]
        ratio, start = f"{middle:.2f} ({low:.2f} - {high:.2f})", f"{row['empty_cache']:.0f} / {row['full_cache']:.0f}"
        print(
            f"{kind:<30}{name:<6}{stage:>5}{row['plain']:>9.3f}{row['compiled']:>11.3f}{ratio:>22}{start:>14}",
            flush=True,
        )
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{arguments.ranks} ranks, medians of {arguments.rounds} rounds, {load()}, {time.strftime('%Y-%m-%d %H:%M')}")


if __name__ == "__main__":
    main()

"""Measure the cost of a memory in a long book: bytes of state and time of a step after 2, 20 and 200 segments.

    python benchmarks/long_book.py                 # a minute on two cores
    python benchmarks/long_book.py --segments 2 2000 --seg-len 256

One process with one lane runs forward and backward of whole segments, with AdamW steps between them. The states after
so many segments are kept, then a step from each is timed in turn, so that a busy moment of the machine affects all
alike; medians are printed. The last columns are the resident set of the process after a fifth of the segments of a run,
and after all.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
from pathlib import Path
from typing import Any

import torch
from lib.common import arguments_of, load, seconds

from dist_mem.block import model_spec
from dist_mem.config import Config, change_config
from dist_mem.memory.base import named_tensors
from dist_mem.model import LMState, MemoryLM

VOCAB = 8192


def memories(mem_len: int) -> dict[str, dict[str, Any]]:
    """Return blocks of every memory with M rows, and of two compositions."""
    short = {"kind": "transformer_xl", "mem_len": mem_len}
    return {
        "none": {"kind": "none"},
        "transformer_xl": short,
        "compressive": {"kind": "compressive", "mem_len": mem_len, "cmem_len": mem_len},
        "lamemo": {"kind": "lamemo", "mem_len": mem_len},
        "infinite": {"kind": "infinite", "over": short},
        "infinite, sticky": {"kind": "infinite", "over": short, "sampling": "sticky"},
        "infinite over lamemo": {"kind": "infinite", "over": {"kind": "lamemo", "mem_len": mem_len}},
    }


def resident_megabytes() -> float:
    """Return the current resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


class Book:
    """One lane that reads one endless book of random words."""

    def __init__(self, memory: dict[str, Any], seg_len: int) -> None:
        torch.manual_seed(0)
        model = {"num_layers": 2, "d_model": 256, "num_heads": 4, "d_inner": 1024, "dropout": 0.0}
        keys = {"model": model, "memory": memory, "train": {"seg_len": seg_len}}
        config: Any = change_config(Config(), keys)
        self.model = MemoryLM(model_spec(config, VOCAB))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seg_len = seg_len
        self.state = self.model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)

    def read(self, state: LMState) -> LMState:
        """Run forward and backward of one segment; return the state after it."""
        tokens = torch.randint(VOCAB, (1, self.seg_len))
        output = self.model(tokens, tokens, torch.tensor([self.seg_len]), state=state)
        aux = sum(loss.mean() for loss in output.aux.values())
        (output.nll.mean() + aux).backward()
        return output.state

    def train(self, num_segments: int) -> None:
        """Train on the next `num_segments` segments."""
        for _ in range(num_segments):
            self.state = self.read(self.state)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def seconds(self, state: LMState) -> float:
        """Return the time of one step from a state, which is not changed."""
        taken = seconds(lambda: self.read(state))
        self.optimizer.zero_grad()
        return taken


def measure(memory: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Measure one memory; return its row of the table."""
    book, ages = Book(memory, arguments.seg_len), sorted(arguments.segments)
    states, resident, age = [], [], 0
    for target in ages:
        book.train(target - age)
        age = target
        states.append(book.state)
    for part in (1, 4):
        book.train(arguments.steps * part // 5)
        gc.collect()
        resident.append(resident_megabytes())
    rounds = [[book.seconds(state) for state in states] for _ in range(arguments.rounds)]
    times = [f"{statistics.median(column) * 1e3:7.1f}" for column in zip(*rounds, strict=True)]
    sizes = [f"{sum(part.nbytes for part in named_tensors(state).values()):>9,}" for state in states]
    return "".join([*sizes, *times, *(f"{value:>9,.1f}" for value in resident)])


def main() -> None:
    """Print the table."""
    parser = arguments_of(__doc__, seg_len=64, mem_len=128, steps=500, rounds=15, threads=2)
    parser.add_argument("--segments", type=int, nargs="+", default=[2, 20, 200], help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ages = sorted(arguments.segments)
    head = [f"{f'bytes@{age}':>9}" for age in ages] + [f"{f'ms@{age}':>7}" for age in ages]
    print(f"{'memory':<22}{''.join(head)}{f'MB@{arguments.steps // 5}':>9}{f'MB@{arguments.steps}':>9}")
    for name, memory in memories(arguments.mem_len).items():
        print(f"{name:<22}{measure(memory, arguments)}", flush=True)
    print(f"medians of {arguments.rounds} rounds, {arguments.threads} threads, {load()}")


if __name__ == "__main__":
    main()

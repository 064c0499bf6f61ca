"""Simulate the parts of a job whose cost grows with the number of ranks, up to 1,024 ranks on one machine.

    python benchmarks/scale.py                        # about five minutes, 1 GB of memory, 0.5 GB of temporary files
    python benchmarks/scale.py --ranks 16 64 --json

Every rank is a thread that runs the code of a rank: a client of the real store of the rendezvous, a real connection for
the votes, its own files. There are no collectives, and no model. The index is like that of PG-19: 28,602 books, with
lengths drawn by a seed. The checkpoint is of ZeRO stage 3, where every rank has a slice of each of 314 parameters; a
slice has four elements, because names and ranges cost here, not bytes.

Seconds are of all ranks together (CPU time of this process), or of one rank, as the table says; so a cost per rank that
does not depend on the number of ranks W grows as W^1 in the first case, as W^0 in the second. The exponent is the slope
of the logarithms.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lib.common import arguments_of, load
from lib.simulated_checkpoint import (
    LANES_PER_RANK,
    RANKS_PER_NODE,
    Figures,
    cpu_seconds,
    ranks_as_threads,
    resume,
    vote_and_save,
)

from dist_mem.data.plan import DocumentPlan, lanes_of_rank
from dist_mem.supervision.hang_report import (
    Position,
    gather_positions,
    note_failed_nodes,
    report,
    suspects,
    write_position,
)
from dist_mem.supervision.rendezvous import RankDevice, meet

SIZES = [16, 64, 256, 1024]
NUM_BOOKS = 28_602  # of PG-19's training split
SEG_LEN = 512


class Opened:
    """Counts the files that this process opens, from Python."""

    def __init__(self) -> None:
        self.count = 0
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.count += event == "open"


opened = Opened()


def plan(num_ranks: int) -> Figures:
    """Compute the order of the first two epochs, as every rank does."""
    lengths = np.random.default_rng(0).lognormal(11.0, 0.9, NUM_BOOKS).astype(np.int64).clip(100, 3_000_000)
    num_lanes = num_ranks * LANES_PER_RANK

    def two_epochs() -> Any:
        made = DocumentPlan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN, seed=0)
        own = lanes_of_rank(num_lanes, num_ranks, num_ranks - 1, LANES_PER_RANK)
        return made, [made.documents(epoch, lane) for epoch in range(2) for lane in own]

    seconds, (made, _) = cpu_seconds(two_epochs)
    arrays = [array for epoch in range(2) for array in made._deal(epoch)]
    return {"plan of two epochs, s of a rank": seconds, "its arrays, MB of a rank": sum(a.nbytes for a in arrays) / 1e6}


def start(num_ranks: int) -> Figures:
    """Let all ranks meet in the store and compare their GPUs, of which those of one node are of another kind."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    compared: list[float] = []

    def own(rank: int) -> RankDevice:
        kind, node = "A100" if rank < RANKS_PER_NODE else "H100", f"node{rank // RANKS_PER_NODE}"
        return RankDevice(node, rank, rank % RANKS_PER_NODE, f"gpu-{rank}", kind, 80 << 30, RANKS_PER_NODE, None)

    def connect(rank: int) -> Any:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(minutes=5))

    def join(rank: int) -> int:
        store = stores[rank]
        began = time.thread_time()
        found = len(meet(store, own(rank), size=num_ranks, seconds=120.0).findings)
        if rank == 0:
            compared.append(time.thread_time() - began)
        return found

    with ranks_as_threads(num_ranks) as run:
        connecting, stores = cpu_seconds(lambda: run(connect))
        seconds, numbers = cpu_seconds(lambda: run(join))
    assert len(set(numbers)) == 1, "all ranks get the same verdict"
    return {
        "start: connecting to torch's store, s of all ranks": connecting,
        "start: rendezvous, s of all ranks": seconds,
        "start: rendezvous, s of rank 0": compared[0],
    }


def hang(num_ranks: int, folder: Path, silent: int) -> Figures:
    """Let all ranks but one write their positions; the lowest live rank gathers them and writes the report."""
    nodes = [f"node{rank // RANKS_PER_NODE}" for rank in range(num_ranks)]
    for rank in range(num_ranks):  # not in threads: each file has the stacks of all threads of its process
        if rank != silent:
            write_position(folder, Position(rank, nodes[rank], 1, 7, "backward", 90, 600.0))
    reports = []

    def end(rank: int) -> None:
        if rank != silent and (positions := gather_positions(folder, rank=rank, num_ranks=num_ranks)):
            suspected = suspects(positions, nodes)
            reports.append(report(positions, nodes, suspected, seconds=600, folder=folder))
            note_failed_nodes(folder, [nodes[rank] for rank in suspected], nodes)

    before, began = opened.count, time.perf_counter()
    with ranks_as_threads(num_ranks) as run:
        seconds, _ = cpu_seconds(lambda: run(end))
    waited = time.perf_counter() - began
    assert len(reports) == 1 and f"rank {silent} (node{silent // RANKS_PER_NODE}) has reported nothing" in reports[0]
    which = "rank 0" if silent == 0 else "last rank"
    return {
        f"hang, {which} silent: files opened": opened.count - before,
        f"hang, {which} silent: s of all ranks": seconds,
        f"hang, {which} silent: s of waiting": waited,
    }


def measure(num_ranks: int) -> Figures:
    """Run all parts for one number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        found = plan(num_ranks) | start(num_ranks) | vote_and_save(num_ranks, run_dir)
        found |= resume(num_ranks, run_dir, num_ranks) | resume(num_ranks, run_dir, num_ranks * 3 // 4)
        for silent in (num_ranks - 1, 0):
            found |= hang(num_ranks, run_dir / f"hang-{silent}", silent)
    return found | {"peak memory of the simulation, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def exponent(sizes: list[int], figures: list[float]) -> float:
    """Return the slope of log(figure) over log(ranks), by least squares."""
    if min(figures) <= 0 or len(sizes) < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])


def main() -> None:
    """Print the table, or JSON."""
    parser = arguments_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(1 << 20)
    sys.setswitchinterval(0.5)  # a thousand threads that ask for the lock 200 times a second do little else
    by_size = {size: measure(size) for size in arguments.ranks}
    table = {what: [by_size[size][what] for size in by_size] for what in by_size[arguments.ranks[0]]}
    laws = {what: exponent(arguments.ranks, figures) for what, figures in table.items()}
    if arguments.json:
        print(json.dumps({"ranks": arguments.ranks, "figures": table, "exponents": laws, "machine": load()}))
        return
    print(f"{load()}\n{'':<52}" + "".join(f"{size:>10,}" for size in arguments.ranks) + f"{'W^':>8}")
    for what, figures in table.items():
        print(
            f"{what:<52}"
            + "".join(f"{figure:>10,.{0 if figure >= 100 else 3}f}" for figure in figures)
            + f"{laws[what]:>8.2f}"
        )


if __name__ == "__main__":
    main()

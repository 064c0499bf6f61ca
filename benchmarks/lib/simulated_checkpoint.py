"""The checkpoint of a simulated job of benchmarks/scale.py: every rank is a thread that saves and reads its part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_mem.checkpoint import commit
from dist_mem.checkpoint.commit import write_checkpoint
from dist_mem.checkpoint.engine_files import EngineReader, engine_ranges
from dist_mem.checkpoint.lane_states import read_lanes, read_random_state
from dist_mem.checkpoint.manifest import read_manifest, step_dir
from dist_mem.checkpoint.snapshot import Snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.data.plan import lanes_of_rank
from dist_mem.engine.zero_state import Slice
from dist_mem.runtime.distributed import World
from dist_mem.supervision.side_channel import SideChannel, accept_all, call, listen

RANKS_PER_NODE = 8
LANES_PER_RANK = 8
LAYERS, PER_LAYER = 24, 13  # parameters of a Transformer-XL; two more have no layer
ELEMENTS = 4  # of a parameter, on each rank
KINDS = ("master", "exp_avg", "exp_avg_sq")
FACTS: dict[str, Any] = {
    "zero_stage": 3,
    "mlflow_run_id": None,
    "data_fingerprint": "",
    "tokenizer_fingerprint": "",
    "meter": {},
}
Figures = dict[str, float]  # what, with its unit -> figure


@contextmanager
def ranks_as_threads(num_ranks: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Yield a function that runs `work(rank)` on all ranks at the same time, and returns the results in rank order."""
    with ThreadPoolExecutor(num_ranks) as threads:
        yield lambda work: list(threads.map(work, range(num_ranks)))


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of all threads during `work`, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


class Carried(NamedTuple):
    """What a lane carries."""

    hidden: torch.Tensor  # (lanes, 4)


def parameter_shapes(num_ranks: int) -> dict[str, list[int]]:
    names = [f"blocks.{layer}.part.{number}.weight" for layer in range(LAYERS) for number in range(PER_LAYER)]
    return {name: [num_ranks * ELEMENTS] for name in [*names, "embedding.weight", "head.bias"]}


def snapshot_of(rank: int, num_ranks: int, shapes: dict[str, list[int]]) -> Snapshot:
    """Return what a rank saves: slices of all parameters, and its lanes."""
    low, high = rank * ELEMENTS, (rank + 1) * ELEMENTS
    part, step = torch.arange(float(low), float(high)), torch.tensor(7.0)
    engine = {f"{kind}/{name}": part for name in shapes for kind in KINDS} | {f"step/{name}": step for name in shapes}
    lane_ids = torch.arange(rank * LANES_PER_RANK, (rank + 1) * LANES_PER_RANK)
    hidden = torch.stack([lane_ids.float()] * 4, dim=1)
    lanes = {"hidden": hidden, "lane_ids": lane_ids, "cursors": torch.stack([lane_ids] * 3, dim=1)}
    return Snapshot(
        step=1,
        parts={"engine": engine, "lanes": lanes, "rng": {"cpu": torch.get_rng_state()}},
        ranges=engine_ranges([Slice(name, low, high, {}) for name in shapes], shapes),
        engine={"shapes": shapes, "aliases": {}, "counters": {}},
        small_files={"config.yaml": b""},
        metadata=FACTS,
    )


def world_of(rank: int, num_ranks: int) -> World:
    return World(rank, num_ranks, rank % RANKS_PER_NODE, RANKS_PER_NODE, torch.device("cpu"))


def vote_and_save(num_ranks: int, run_dir: Path) -> Figures:
    """Connect all ranks, vote, and write a checkpoint; rank 0 collects ranges, and writes engine.json and manifest."""
    server, hub = listen(num_ranks)

    def connect(rank: int) -> SideChannel:
        peers = call(hub, "127.0.0.1", rank) if rank else accept_all(server, hub, num_ranks)
        return SideChannel(peers, rank=rank, size=num_ranks)

    finish, on_rank0 = commit._finish, [0.0]

    def timed_finish(*arguments: Any) -> Any:
        began = time.thread_time()
        written = finish(*arguments)
        on_rank0[0] = time.thread_time() - began
        return written

    shapes = parameter_shapes(num_ranks)
    snapshots = [snapshot_of(rank, num_ranks, shapes) for rank in range(num_ranks)]
    vars(commit)["_finish"] = timed_finish
    with server, ranks_as_threads(num_ranks) as run:
        before = len(list(Path("/proc/self/fd").iterdir()))
        connecting, channels = cpu_seconds(lambda: run(connect))
        sockets = len(list(Path("/proc/self/fd").iterdir())) - before
        voting, _ = cpu_seconds(lambda: run(lambda rank: channels[rank].decide_on_rank0(rank, sum)))

        def save(rank: int) -> Any:
            return write_checkpoint(
                snapshots[rank],
                run_dir=run_dir,
                world=world_of(rank, num_ranks),
                channel=channels[rank],
                rules=CheckpointConfig(),
                flush_records=lambda: None,
            )

        saving, written = cpu_seconds(lambda: run(save))
        for channel in channels:
            channel.close()
    commit._finish = finish
    directory = written[0].path
    return {
        "vote: connections": sockets / 2,
        "vote: connecting, s of all ranks": connecting,
        "vote: one vote, s of all ranks": voting,
        "save: s of all ranks": saving,
        "save: index and manifest, s of rank 0": on_rank0[0],
        "save: files": written[0].num_files,
        "save: engine.json, MB": (directory / "engine.json").stat().st_size / 1e6,
        "save: manifest.json, MB": (directory / "manifest.json").stat().st_size / 1e6,
    }


def resume(num_ranks: int, run_dir: Path, then: int) -> Figures:
    """Read what one of `then` ranks needs of the checkpoint of `num_ranks`: engine, lanes, random state."""
    directory = step_dir(run_dir, 1)
    total, num_lanes = num_ranks * ELEMENTS, num_ranks * LANES_PER_RANK
    part = -(-total // then)
    times = []
    num_files = 0
    for rank in (0, then // 2, then - 1):
        world = world_of(rank, then)

        def restore(rank: int = rank, world: World = world) -> EngineReader:
            manifest = read_manifest(directory)
            reader = EngineReader(directory)
            start, stop = min(rank * part, total), min((rank + 1) * part, total)
            for name in reader.index["shapes"] if start < stop else ():
                for kind in (*KINDS, "step"):
                    found = reader.read(kind, name, start, stop)
                    assert found is not None and (kind == "step" or found.tolist() == list(range(start, stop)))
            lane_ids = torch.tensor(lanes_of_rank(num_lanes, then, rank, 1))
            fresh = Carried(torch.zeros(len(lane_ids), 4))
            lanes = read_lanes(directory, manifest, lane_ids, [fresh], num_lanes=num_lanes)
            is_busy = lane_ids < num_lanes
            assert torch.equal(lanes.states[0].hidden[is_busy, 0], lane_ids[is_busy].float())
            if then == num_ranks:
                read_random_state(directory, world)
            return reader

        seconds, reader = cpu_seconds(restore)
        times.append(seconds)
        num_files = max(num_files, len(reader._files))
    how = "resume" if then == num_ranks else "resume on 3/4 of the ranks"
    return {f"{how}: s of a rank": statistics.median(times), f"{how}: rank files of a rank": num_files}

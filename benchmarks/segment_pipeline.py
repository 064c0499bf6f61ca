"""Simulate and try a pipeline of segments: one document whose segments flow through groups of blocks on several ranks.

    python benchmarks/segment_pipeline.py --parts simulate --softmax 1.3  # utilisation: stages x segments
    python benchmarks/segment_pipeline.py --parts ranks --memories infini  # two gloo ranks beside one process; see lib
    python benchmarks/segment_pipeline.py --parts diagonal --memories armt  # blocks of different segments in one batch
    python benchmarks/segment_pipeline.py --tiny  # all of it, small

Segment s + 1 in block b needs segment s in block b, and segment s + 1 in block b - 1, but nothing of the blocks above.
So a stage, a group of blocks on a rank, begins the next segment while the stages above read this one: see
docs/dev/segment_pipeline.md. `simulate` takes seconds, `ranks` half a minute for each memory (it fails if a loss or a
state differs in a bit) and `diagonal` less; a process computes with one thread. The diagonal order is for one text,
without gradient: blocks of different segments are one batch, by vmap over stacked weights. Shape letters: B lanes,
T segment, D model, L blocks, n segments.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from lib.common import interleaved, load
from lib.segment_stages import (
    NUM_STAGES,
    TrialFigures,
    TrialSize,
    build_model,
    first_state,
    random_text,
    refusal,
    run_rank,
)
from torch import Tensor, multiprocessing
from torch.func import functional_call, stack_module_state, vmap

from dist_mem.memory.base import MemoryState, map_state
from dist_mem.model import MemoryLM

MEMORIES = ["transformer_xl", "gated_deltanet", "infini", "armt", "lamemo", "rmt", "rmt_rows"]
SIZE = TrialSize(layers=8, width=256, seg_len=64, vocab=2048, segments=16, rounds=3)
TINY = TrialSize(layers=4, width=32, seg_len=16, vocab=101, segments=5, rounds=1)


class StageTimes(NamedTuple):
    forward: list[float]  # of one segment, in every stage
    backward: list[float]


def operations(stage: int, num_stages: int, num_segments: int, window_len: int | None) -> Iterator[tuple[str, int]]:
    """Yield forwards and backwards of a stage in their order; `window_len` is K, None: there is no backward.

    One window forward, one backward, after one window forward for each stage above: the next window's forward needs
    the last state of this one as a constant. So the first stage keeps K segments for each stage, or all of them.
    """
    if window_len is None:
        yield from (("forward", segment) for segment in range(num_segments))
        return
    windows = [range(begin, begin + window_len) for begin in range(0, num_segments, window_len)]
    num_ahead = min(len(windows), num_stages - 1 - stage)
    for number in range(len(windows) + num_ahead):
        if number < len(windows):
            yield from (("forward", segment) for segment in windows[number])
        if number >= num_ahead:
            yield from (("backward", segment) for segment in reversed(windows[number - num_ahead]))


def utilisation(times: StageTimes, num_segments: int, window_len: int | None) -> float:
    """Return the share of the time of all stages in which they compute."""
    num_stages = len(times.forward)
    left = [list(operations(stage, num_stages, num_segments, window_len)) for stage in range(num_stages)]
    ends: dict[tuple[str, int, int], float] = {}
    clocks, busy = [0.0] * num_stages, 0.0
    while any(left):
        for stage, todo in enumerate(left):
            while todo:
                kind, segment = todo[0]
                before = stage - 1 if kind == "forward" else stage + 1
                if 0 <= before < num_stages and (kind, segment, before) not in ends:
                    break
                took = getattr(times, kind)[stage]
                clocks[stage] = max(clocks[stage], ends.get((kind, segment, before), 0.0)) + took
                ends[kind, segment, stage] = clocks[stage]
                busy += took
                del todo[0]
    return busy / (num_stages * max(clocks))


def best_split(costs: Sequence[float], num_stages: int) -> list[float]:
    """Return the costs of stages, successive parts of the model, whose slowest is as fast as can be."""
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    splits = ([sum(costs[low:high]) for low, high in pairwise((0, *inner, len(costs)))] for inner in cuts)
    return min(splits, key=max)


def simulate(arguments: argparse.Namespace) -> None:
    """Print utilisation for equal stages, and for those of blocks between an embedding and a softmax."""
    ratio, num_blocks = arguments.ratio, arguments.blocks
    schedules = {"forward alone": None, "K = 1": 1, "K = 4": 4, "K = all": 0}
    print(f"backward / forward = {ratio:g}; {num_blocks} blocks, softmax = {arguments.softmax:g} blocks")
    print(f"{'stages':<8}{'cut':<8}{'slowest/mean':>13}{'segments':>10}" + "".join(f"{name:>14}" for name in schedules))
    for num_stages in (2, 4, 8):
        per_stage = num_blocks // num_stages
        blocks = [arguments.embedding + 1.0, *[1.0] * (num_blocks - 2), 1.0 + arguments.softmax]
        even = [sum(blocks[begin : begin + per_stage]) for begin in range(0, num_blocks, per_stage)]
        cuts = {"equal": [1.0] * num_stages, "blocks": even, "best": best_split(blocks, num_stages)}
        for cut, forward in cuts.items():
            times = StageTimes(forward, [ratio * each for each in forward])
            for num in (4, 16, 64):
                lengths = [num if length == 0 else length for length in schedules.values()]
                shares = "".join(f"{utilisation(times, num, length):>14.3f}" for length in lengths)
                print(f"{num_stages:<8}{cut:<8}{max(forward) / statistics.fmean(forward):>13.2f}{num:>10}{shares}")


def try_ranks(names: Sequence[str], size: TrialSize) -> None:
    """Print how two ranks compare with one process, and what the simulation makes of their own seconds."""
    print(f"{size}; {load()}")
    print(f"{'memory':<16}{'gradients: fp32':>16}{'fp64':>10}{'shared':>8}{'s: one':>9}{'two':>7}{'ratio':>7}", end="")
    print(f"{'own s: one':>13}{'rank 0':>8}{'rank 1':>8}{'simulated ratio':>17}")
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.spawn(run_rank, (names, size, folder, queue), NUM_STAGES, join=False)
        has_ended = False
        while not has_ended:
            has_ended = ranks.join(timeout=0.2)
            while not queue.empty():
                name, found = queue.get()
                print(f"{name:<16}{found if isinstance(found, str) else describe_trial(found, size)}", flush=True)


def describe_trial(found: TrialFigures, size: TrialSize) -> str:
    """Return a line of the table; losses and states had equal bits."""
    num = size.segments
    times = StageTimes(*([each / num for each in part] for part in (found.forward_own, found.backward_own)))
    own = [sum(both) for both in zip(*times, strict=True)]
    simulated = found.whole_own / num * utilisation(times, num, num) * NUM_STAGES / sum(own)
    cells = f"{found.float32:>16.1e}{found.float64:>10.1e}{found.num_shared:>8}{found.whole:>9.2f}{found.stages:>7.2f}"
    cells += f"{found.whole / found.stages:>7.2f}{found.whole_own:>13.2f}"
    return cells + "".join(f"{each * num:>8.2f}" for each in own) + f"{simulated:>17.2f}"


def read_plainly(model: MemoryLM, tokens: Tensor, targets: Tensor, num: int) -> Tensor:
    """Score a text segment by segment, (B, n T)."""
    state, scores, valid_len = first_state(model), list[Tensor](), torch.tensor([tokens.shape[1] // num])
    for segment in zip(tokens.chunk(num, 1), targets.chunk(num, 1), strict=True):
        output = model(*segment, valid_len, state=state)
        state = output.state
        scores.append(output.nll)
    return torch.cat(scores, 1)


def put_in(low: int, old: Tensor, new: Tensor) -> Tensor:
    """Return `old` with `new` in the place of its parts from `low` on."""
    return torch.cat([old[:low], new, old[low + len(new) :]])


def own_seconds(function: Callable[[], Any]) -> float:
    """Return this process's own time of one call: the cores may be shared."""
    began = time.process_time()
    function()
    return time.process_time() - began


class DiagonalReader:
    """Reads a text in the diagonal order: at time t, block b reads segment t - b, all blocks as one batch."""

    def __init__(self, model: MemoryLM) -> None:
        """Stack the weights of all blocks.

        Raises:
            ValueError: a block has other parameters than the first one.
        """
        if len({frozenset(dict(block.named_parameters())) for block in model.blocks}) > 1:
            raise ValueError("not stacked: not all blocks have the same parameters")
        self.model, self.weights = model, stack_module_state(list(model.blocks))

    def read(self, tokens: Tensor, targets: Tensor, num: int) -> Tensor:
        """Score a text of n segments, (B, n T)."""
        model, num_blocks = self.model, len(self.model.blocks)
        segments, wanted = tokens.chunk(num, 1), targets.chunk(num, 1)
        (blocks, stem, types), valid_len = first_state(model), torch.tensor([segments[0].shape[1]])
        states = map_state(lambda *parts: torch.stack(parts), *blocks)
        run = vmap(partial(self.run_block, valid_len))
        scores, low, y = list[Tensor](), 0, tokens.new_empty(0)
        for at in range(num + num_blocks - 1):
            inputs = [y[: num_blocks - 1 - low]] if at else []  # what the last block made goes to the softmax
            low, high = max(0, at - num + 1), min(num_blocks, at + 1)
            if at < num:
                rows, stem = model.stem(model.embed(segments[at], valid_len, types)[0], stem)
                inputs.insert(0, rows[None])
            part = slice(low, high)
            weights = [{name: each[part] for name, each in kind.items()} for kind in self.weights]
            y, new = run(weights, torch.cat(inputs), map_state(lambda each, own=part: each[own], states))
            states = new if high - low == num_blocks else map_state(partial(put_in, low), states, new)
            if high == num_blocks:
                top, _ = model.stem.read_top(model.final_norm(y[-1]), stem, seg_len=segments[0].shape[1])
                scores.append(model.head(top, wanted[len(scores)]).nll)
        return torch.cat(scores, 1)

    def run_block(self, valid_len: Tensor, weights: Any, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Run one block, whose weights stand in for those of the first; a full segment's state is kept."""
        output = functional_call(self.model.blocks[0], tuple(weights), (x, state, valid_len))
        return output.y, output.state


@torch.no_grad()
def try_diagonal(names: Sequence[str], size: TrialSize) -> None:
    """Print how the diagonal order compares with the plain one, on one thread; seconds are medians."""
    torch.set_num_threads(1)
    print(f"{size}; {load()}")
    print(f"{'memory':<16}{'largest difference':>20}{'own s: plain':>14}{'diagonal':>10}{'ratio':>7}")
    for name in names:
        model = build_model(name, size).eval()
        text = (*random_text(size), size.segments)
        try:
            reason, reader = refusal(model), DiagonalReader(model)
            difference = 0.0 if reason else (reader.read(*text) - read_plainly(model, *text)).abs().max().item()
        except (ValueError, RuntimeError) as error:  # the latter: of vmap
            reason = str(error).split(". ")[0]
        if reason:
            print(f"{name:<16}{reason}", flush=True)
            continue
        calls: dict[str, Callable[[], Any]] = {
            "plain": partial(read_plainly, model, *text),
            "diagonal": partial(reader.read, *text),
        }
        plain, diagonal = (statistics.median(each) for each in interleaved(calls, size.rounds, own_seconds).values())
        print(f"{name:<16}{difference:>20.1e}{plain:>14.3f}{diagonal:>10.3f}{plain / diagonal:>7.2f}", flush=True)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["simulate", "ranks", "diagonal"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--memories", nargs="+", default=MEMORIES, help="names of configs/memory")
    parser.add_argument("--ratio", type=float, default=2.0, help="time of a backward / of a forward; recomputed: 3")
    parser.add_argument("--blocks", type=int, default=16, help="of the simulation")
    parser.add_argument("--embedding", type=float, default=0.0, help="time of the embedding / of a block")
    parser.add_argument("--softmax", type=float, default=1.0, help="time of the softmax / of a block: V / (12 D)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    for key in TrialSize._fields:
        parser.add_argument(f"--{key.replace('_', '-')}", type=int)
    arguments = parser.parse_args()
    given = {key: value for key in TrialSize._fields if (value := getattr(arguments, key)) is not None}
    size = (TINY if arguments.tiny else SIZE)._replace(**given)
    for part in arguments.parts:
        if part == "simulate":
            simulate(arguments)
        elif part == "ranks":
            try_ranks(arguments.memories, size)
        else:
            try_diagonal(arguments.memories, size)


if __name__ == "__main__":
    main()

"""Measure an update with Muon beside one with AdamW: the same model and tokens, ZeRO stage 0, one rank.

    python benchmarks/muon.py  # widths 256 and 512, 1 and 8 thousand tokens an update: ten minutes on one core
    python benchmarks/muon.py --tiny

Each is a process of its own, by turns, so that a busy moment meets both. "ratio" is the median of the turns' ratios,
Muon by AdamW, beside the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from lib.common import interleaved, load

VOCAB = 8_192
UPDATES = 5  # of a turn, after one that is not timed


def measure_here(overrides: list[str]) -> float:
    """Return the median seconds of an update, in this process."""
    import torch
    from lib.updates import engine_of, step_of, update_of

    from dist_mem.config import load_config
    from dist_mem.memory import memory_options
    from dist_mem.runtime import distributed

    config = load_config(overrides, memory_options=memory_options)
    with distributed.joining():
        world = distributed.initialize()
    torch.set_num_threads(1)
    engine = engine_of(config, VOCAB)
    update = update_of(config, range(config.train.global_batch_size), VOCAB)
    step = step_of(engine, config, world, update)
    step()
    return statistics.median(interleaved({"": step}, UPDATES)[""])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="one model of a few thousand parameters")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(arguments.here)))
        return
    print(f"{'width':>6}{'tokens':>8}{'AdamW, s':>10}{'Muon, s':>10}{'ratio':>8}; {load()}")
    for width in (16,) if arguments.tiny else (256, 512):
        for lanes in (2,) if arguments.tiny else (8, 64):
            times: dict[str, list[float]] = {"adamw": [], "muon": []}
            for _ in range(1 if arguments.tiny else arguments.turns):
                for kind, found in times.items():
                    found.append(_measure(kind, width, lanes, seg_len=16 if arguments.tiny else 128))
            ratios = [muon / adamw for adamw, muon in zip(*times.values(), strict=True)]
            medians = "".join(f"{statistics.median(found):>10.3f}" for found in times.values())
            spread = f"{statistics.median(ratios):>8.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            tokens = lanes * (16 if arguments.tiny else 128)
            print(f"{width:>6}{tokens:>8,}{medians}{spread}", flush=True)


def _measure(kind: str, width: int, lanes: int, *, seg_len: int) -> float:
    keys = [f"model.d_model={width}", f"model.d_inner={4 * width}", "model.num_heads=4", "model.num_layers=4"]
    keys += [f"train.global_batch_size={lanes}", f"train.micro_batch_size={min(8, lanes)}", f"train.seg_len={seg_len}"]
    keys += ["train.precision=fp32", "train.threads=1", "train.steps=9", f"optimizer.kind={kind}", "data.path=none"]
    keys += [f"memory={{kind: transformer_xl, mem_len: {seg_len}}}", "deepspeed.zero_optimization.stage=0"]
    command = [sys.executable, __file__, "--here", *keys]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True).stdout
    return float(output.splitlines()[-1])


if __name__ == "__main__":
    main()

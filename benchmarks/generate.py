"""Measure the tokens per second of generation with every memory, and of rereading the document for each token.

    python benchmarks/generate.py                    # the size of configs/demo.yaml: about two minutes on two cores
    python benchmarks/generate.py --lanes 16 --seg-len 128 --mem-len 128

Each round generates one segment of T tokens, so that the open segment has every length once, after 500 and after 5,000
tokens of the document. "rereading" reads all 5,000 tokens from the start in segments of T, as generation without a
carried memory would for every token. "scoring" computes the losses of a segment, as an evaluation does, with a full
memory. transformers' GPT-2 and, where it is installed (see peers.py), x-transformers stand beside them: with a context
of M tokens, whose reading is measured and subtracted. Rounds are interleaved and medians printed, so that a busy moment
of the machine affects all cases alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lib.common import arguments_of, interleaved, load
from lib.peer_generation import peers
from memory import configuration, device_seconds, memories

from dist_mem.block import model_spec
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import next_log_probs, read, start
from dist_mem.model import MemoryLM

EARLY, LATE = 500, 5000  # tokens read before
SAMPLING = Sampling(top_p=0.95)


def trained_model(memory: dict[str, Any], arguments: argparse.Namespace, device: torch.device) -> TrainedModel:
    """Return a model with initial weights: the speed does not depend on their values."""
    config = configuration(memory, arguments)
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, arguments.vocab)).to(device).eval()
    tokenizer = Tokenizer([b"x"] * arguments.vocab, bos_id=0, fingerprint="")
    checkpoint: Any = None
    return TrainedModel(model, tokenizer, config, checkpoint, device, torch.float32)


def calls(trained: TrainedModel, arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return the calls to time for one model."""
    document = np.random.default_rng(0).integers(1, arguments.vocab, LATE)
    documents = [document] * arguments.lanes
    early, late = (
        read(trained, start(trained, arguments.lanes), [part[:length] for part in documents])
        for length in (EARLY, LATE)
    )

    def write(reading: Any) -> Callable[[], Any]:
        return lambda: generate(trained, reading, num_tokens=arguments.seg_len, sampling=SAMPLING)

    def reread() -> Any:
        return next_log_probs(trained, read(trained, start(trained, arguments.lanes), documents))

    model, lanes = trained.model, arguments.lanes
    segment = torch.as_tensor(document[: arguments.seg_len]).expand(lanes, -1)
    state = late.state

    @torch.no_grad()
    def score() -> Any:
        return model(segment, segment, torch.full((lanes,), arguments.seg_len), state=state).nll.sum()

    return {"early": write(early), "late": write(late), "rereading": reread, "scoring": score}


def main() -> None:
    """Print the table."""
    sizes = {"num_layers": 2, "d_model": 128, "num_heads": 4, "d_head": 32, "d_inner": 256}
    run = {"seg_len": 64, "mem_len": 192, "lanes": 1, "vocab": 4096, "rounds": 5, "threads": 1}
    arguments = arguments_of(__doc__, **sizes, **run).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    cases = {
        kind: calls(trained_model(memory, arguments, device), arguments)
        for kind, memory in memories(arguments.mem_len).items()
    }
    cases |= peers(arguments) if device.type == "cpu" else {}
    timed = {(kind, what): call for kind, named in cases.items() for what, call in named.items()}
    times = interleaved(timed, arguments.rounds, device_seconds)
    medians = {case: statistics.median(values) for case, values in times.items()}
    tokens = arguments.lanes * arguments.seg_len
    head = f"{'memory':<30}{f'after {EARLY}':>12}{f'after {LATE:,}':>13}{'scoring':>11}{'rereading':>11}"
    print(f"{head}   tokens/s, {arguments.lanes} lanes")
    for kind, named in cases.items():
        scoring = f"{tokens / medians[kind, 'scoring']:>11,.0f}"
        if "prompt" in named:
            late = tokens / (medians[kind, "prompt and late"] - medians[kind, "prompt"])
            print(f"{kind:<30}{'':>12}{late:>13,.1f}{scoring}")
            continue
        early, late = (tokens / medians[kind, what] for what in ("early", "late"))
        rereading = f"{arguments.lanes / medians[kind, 'rereading']:>11,.2f}"
        print(f"{kind:<30}{early:>12,.1f}{late:>13,.1f}{scoring}{rereading}")
    rounds = f"medians of {arguments.rounds} rounds, {arguments.threads} threads, {load()}"
    print(f"T {arguments.seg_len}, M {arguments.mem_len}; {rounds}")


if __name__ == "__main__":
    main()

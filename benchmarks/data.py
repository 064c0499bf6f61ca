"""Compare the tokens per second of lane readers: dist_mem, webdataset, mosaicml-streaming and a raw memory map.

    python benchmarks/data.py                                   # about a minute, 250 MB in a temporary folder
    python benchmarks/data.py --shapes 32x512 --rounds 15

Every reader (lib/lane_readers.py) turns the same synthetic documents, of book-like lengths and in the page cache, into
the same kind of Batch: int64 inputs and targets of B lanes, BOS, no segment across two documents, padding. The
benchmark uses one process and one thread, interleaves the rounds, and prints medians. mosaicml-streaming is not a
requirement of the project and needs an older numpy; install it in a separate environment:

    python3 -m venv /tmp/mds
    /tmp/mds/bin/pip install mosaicml-streaming webdataset==1.0.2 omegaconf==2.4.0 sentencepiece==0.2.3
    PYTHONPATH=. /tmp/mds/bin/python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from lib.common import arguments_of, load
from lib.lane_readers import Reader, open_readers, streaming

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer

STEP_SECONDS = 0.0117  # 8 x 512 tokens x 151 M parameters x 6 FLOP, at 40 % of an H200's 790 bf16 TFLOP/s


def write_data(folder: Path, num_tokens: int) -> None:
    """Write the same documents as dist_mem's tars, as one flat file, and as MDS shards."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(11.2, 0.9, size=num_tokens // 20_000), 2_000_000).astype(int)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    tokens = [draw.integers(0, 32_000, length, dtype=np.uint16) for length in lengths]
    save_tokenizer(BytesTokenizer(), folder)
    write_split(
        (TokenizedDocument(f"d{number}", "", None, 0, 0, part) for number, part in enumerate(tokens)),
        folder / "train",
        name="synthetic",
        split="train",
        tokenizer_fingerprint=BytesTokenizer().fingerprint,
    )
    np.concatenate(tokens).tofile(folder / "flat.bin")
    if streaming is not None:
        with streaming.MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as writer:
            for part in tokens:
                writer.write({"tokens": part})
    print(
        f"{len(tokens)} documents, {sum(map(len, tokens)) / 1e6:.0f} M tokens, median length {np.median(lengths):,.0f}"
    )


def rate(reader: Reader, num_batches: int, clock: Callable[[], float]) -> float:
    """Return the tokens per second over `num_batches` batches."""
    with reader.during():
        began = clock()
        lengths = [batch.valid_len for batch in islice(reader.batches, num_batches)]
        seconds = clock() - began
    return int(torch.stack(lengths).sum()) / seconds


def compare(folder: Path, num_lanes: int, seg_len: int, arguments: argparse.Namespace) -> None:
    """Measure one shape and print its table."""
    readers = open_readers(folder, num_lanes, seg_len)
    for reader in readers:  # warm up, and check that all readers yield the same kind of batch
        batch = next(reader.batches)
        kinds = [(part.dtype, part.shape, part.is_contiguous()) for part in batch if part is not None]
        assert kinds == [(torch.int64, (num_lanes, seg_len), True)] * 2 + kinds[2:] and len(kinds) == 5, reader.name
    num_batches = -(-int(arguments.round_tokens * 1e6) // (num_lanes * seg_len))
    rates: dict[str, list[float]] = {reader.name: [] for reader in readers}
    for _ in range(arguments.rounds):
        for reader in readers:
            rates[reader.name].append(rate(reader, num_batches, arguments.clock))
    print(
        f"\n{f'{num_lanes} lanes x {seg_len}':<38}{'M tokens/s':>11}{'lowest to highest':>20}{'ratio':>8}{'us/step':>9}"
    )
    first = statistics.median(rates[readers[0].name])
    for reader in readers:
        median, found = statistics.median(rates[reader.name]), rates[reader.name]
        spread = f"{min(found) / 1e6:.0f} to {max(found) / 1e6:.0f}"
        step = num_lanes * seg_len / median * 1e6
        print(f"{reader.name:<38}{median / 1e6:>11.1f}{spread:>20}{median / first:>8.2f}{step:>9.0f}")
        reader.close()


def main() -> None:
    """Measure every shape and print a table for it."""
    parser = arguments_of(__doc__, rounds=7)
    parser.add_argument("--tokens", type=float, default=60, help="millions of tokens to write (default: 60)")
    parser.add_argument("--round-tokens", type=float, default=6, help="millions of tokens of one round (default: 6)")
    parser.add_argument("--shapes", nargs="+", default=["8x512", "64x150", "256x512"], metavar="LANESxTOKENS")
    parser.add_argument(
        "--cpu-time",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        dest="clock",
        help="on a busy machine: count this process's CPU seconds (not a worker's)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{load()}, numpy {np.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), int(arguments.tokens * 1e6))
        for shape in arguments.shapes:
            num_lanes, seg_len = map(int, shape.split("x"))
            compare(Path(folder), num_lanes, seg_len, arguments)
    if streaming is None:
        print("\nmosaicml-streaming: not installed (python benchmarks/data.py --help says how)")
    print(f"{load()} at the end; an H200 takes about {STEP_SECONDS * 1e3:.0f} ms for 8 x 512 tokens")


if __name__ == "__main__":
    main()

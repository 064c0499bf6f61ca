"""Open the index of a split of many documents, and compute the plan of an epoch: seconds and memory of a process.

    python benchmarks/index.py                                   # up to 100,000 documents, a few seconds
    python benchmarks/index.py --documents 10000000 --keep DIR   # 1.4 GB of files

Every number is of a fresh process. Memory is what the process adds: `private` is its own, `shared` are pages of
documents.safetensors, which all processes of the machine have in common. The index describes tars that do not exist;
no document is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lib.common import arguments_of, load

SIZES = [10_000, 100_000]
IN_A_TAR = 20_000  # documents
NUM_LANES, SEG_LEN = 1024, 512


def make_split(split_dir: Path, num_documents: int) -> None:
    """Write an index as `write_split` does, without entries."""
    from dist_mem.data.index import FORMAT_VERSION, NO_OFFSET, NO_YEAR, write_index

    draw = np.random.default_rng(0)
    numbers = np.arange(num_documents, dtype=np.int64)
    lengths = draw.lognormal(6.0, 0.9, num_documents).astype(np.int64).clip(1, 10**6)
    columns = {
        **{"num_tokens": lengths, "words": lengths, "bytes": 4 * lengths, "tokens_offset": numbers % IN_A_TAR * 4096},
        **dict.fromkeys(("mask_offset", "recall_offset"), np.full(num_documents, NO_OFFSET, np.int64)),
        "year": np.full(num_documents, NO_YEAR, np.int32),
        "shard": (numbers // IN_A_TAR).astype(np.int32),
        "token_bytes": np.full(num_documents, 2, np.uint8),
        "sha256": draw.integers(0, 256, (num_documents, 32), np.uint8),
    }
    for name, form in {"id": "document-{:08d}", "title": "Document {:08d}"}.items():
        joined = "".join(map(form.format, range(num_documents)))
        columns[f"{name}_text"] = np.frombuffer(joined.encode(), np.uint8)
        columns[f"{name}_ends"] = (numbers + 1) * len(form.format(0))
    num_tars, total = -(-num_documents // IN_A_TAR), int(lengths.sum())
    head = {
        **{
            "format_version": FORMAT_VERSION,
            "name": "big",
            "split": "train",
            "tokenizer_fingerprint": "",
            "recipe": "",
        },
        **{"official_words": None, "num_documents": num_documents},
        **{"num_tokens": total, "counted_words": total, "num_bytes": 4 * total},
        "shards": [{"name": f"big-train-{tar:05d}.tar", "bytes": 2**50, "sha256": "0" * 64} for tar in range(num_tars)],
    }
    write_index(split_dir, head, columns)


def opened(split_dir: Path) -> Any:
    """Open an index as a rank does."""
    from dist_mem.data.shard import read_index

    return read_index(split_dir)


def plan(split_dir: Path) -> Callable[[], Any]:
    """Return the function that computes the plan of an epoch of an opened index."""
    from dist_mem.data.plan import DocumentPlan

    index = opened(split_dir)
    lengths = index.documents.num_tokens

    def one_epoch() -> Any:
        made = DocumentPlan(lengths, num_lanes=NUM_LANES, seg_len=SEG_LEN, seed=0)
        return made, made.documents(0, 0)

    return one_epoch


def memory() -> dict[str, float]:
    """Return private and shared resident MB of this process, and the peak of both."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(found[key].split()[0]) for key in ("RssAnon", "RssFile", "VmHWM")}
    return {"private": kib["RssAnon"] / 1e3, "shared": kib["RssFile"] / 1e3, "peak": kib["VmHWM"] / 1e3}


def measure_here(what: str, split_dir: Path) -> dict[str, float]:
    """Run one part in this process."""
    import dist_mem.data.shard  # noqa: F401  # not part of the time

    action = plan(split_dir) if what == "plan" else lambda: opened(split_dir)
    before, began, processor = memory(), time.perf_counter(), time.process_time()
    result = action()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    after = memory()
    del result
    return {"s": seconds, "cpu_s": processor} | {key: after[key] - before[key] for key in after}


def measure(what: str, split_dir: Path) -> dict[str, float]:
    """Run one part in a fresh process."""
    command = [sys.executable, __file__, "--part", what, "--keep", str(split_dir)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(answer.splitlines()[-1]))


def main() -> None:
    """Print the table."""
    parser = arguments_of(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=SIZES, help="default: %(default)s")
    parser.add_argument("--keep", metavar="DIR", help="where indexes are made and stay; default: a temporary folder")
    parser.add_argument("--part", help="used by the program itself")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measure_here(arguments.part, Path(arguments.keep))))
        return
    print(f"{load()}\n{'documents':>10} {'':<8}{'s':>9}{'CPU s':>9}{'private':>9}{'shared':>9}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as temporary:
        for size in arguments.documents:
            split_dir = Path(arguments.keep or temporary) / str(size)
            split_dir.mkdir(parents=True, exist_ok=True)
            if not (split_dir / "index.json").exists():
                make_split(split_dir, size)
            for part in ("open", "plan"):
                found = measure(part, split_dir)
                print(f"{size:>10,} {part:<8}" + "".join(f"{each:>9,.2f}" for each in found.values()), flush=True)


if __name__ == "__main__":
    main()

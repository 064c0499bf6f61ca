"""Open the index of a split of many documents, and compute the plan of an epoch: seconds and memory of a process.

    python benchmarks/index.py                                   # up to 100,000 documents, about a minute
    python benchmarks/index.py --documents 10000000 --keep DIR   # 3.3 GB of files; minutes

Every figure is of a fresh process. `first` writes the file of columns, `later` maps it, as every rank of a later job
does. Memory is what the process adds: `private` is its own, `shared` are pages of the file, which all processes of the
machine have in common. `simple` reads the JSON into Python objects without any check, up to a million documents.
The index describes tars that do not exist; no document is read.
"""

from __future__ import annotations

import hashlib
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
SIMPLE_UP_TO = 1_000_000  # documents; above, the simple reader needs tens of GB


def write_index(path: Path, num_documents: int) -> None:
    """Write an index.json as `write_split` does, but without holding it."""
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(6.0, 0.9, num_documents).astype(np.int64).clip(1, 10**6)
    num_tars = -(-num_documents // IN_A_TAR)
    tars = [{"name": f"big-train-{tar:05d}.tar", "bytes": 2**50, "sha256": "0" * 64} for tar in range(num_tars)]
    total = int(lengths.sum())
    sums = {"num_tokens": total, "counted_words": total, "num_bytes": 4 * total}
    head = {"format_version": 1, "name": "big", "split": "train", "tokenizer_fingerprint": "", "recipe": ""}
    body = head | {"official_words": None} | sums | {"shards": tars}
    digest = hashlib.sha256(f'{{"counted_words":{total},"documents":['.encode())
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(body, indent=1)[:-2] + ',\n "documents": [')
        for first in range(0, num_documents, IN_A_TAR):
            numbers = zip(range(first, num_documents), lengths[first : first + IN_A_TAR].tolist(), strict=False)
            keys = [_document(number, length, tars[first // IN_A_TAR]["name"]) for number, length in numbers]
            mark = "," if first else ""
            file.write(mark + ",".join("\n  {\n   " + ",\n   ".join(entry) + "\n  }" for entry in keys))
            compact = ",".join("{" + ",".join(sorted(entry)).replace('": ', '":') + "}" for entry in keys)
            digest.update((mark + compact).encode())
        rest = {key: value for key, value in body.items() if key > "documents"}
        digest.update(b"]," + json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()[1:])
        file.write(f'\n ],\n "fingerprint": "{digest.hexdigest()}"\n}}\n')


def _document(number: int, length: int, tar: Any) -> list[str]:
    return [
        f'"id": "document-{number:08d}"',
        f'"title": "Document {number}"',
        '"year": null',
        f'"words": {length}',
        f'"bytes": {4 * length}',
        f'"num_tokens": {length}',
        f'"shard": "{tar}"',
        '"dtype": "<u2"',
        f'"tokens_offset": {number % IN_A_TAR * 4096 + 640}',
        '"mask_offset": null',
        '"recall_offset": null',
        f'"sha256": "{number:064x}"',
    ]


def simple(split_dir: Path) -> Any:
    """Read an index as Python objects."""
    from dist_mem.data.document_table import DocumentEntry

    body = json.loads((split_dir / "index.json").read_bytes())
    return [DocumentEntry(**entry) for entry in body["documents"]]


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
    action = {"simple": lambda: simple(split_dir), "open": lambda: opened(split_dir)}.get(what) or plan(split_dir)
    if what == "open":
        import dist_mem.data.shard  # noqa: F401  # not part of the time
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
                write_index(split_dir / "index.json", size)
            (split_dir / "index.safetensors").unlink(missing_ok=True)
            parts = {"first": "open", "later": "open", "plan": "plan"} | (
                {"simple": "simple"} if size <= SIMPLE_UP_TO else {}
            )
            for name, part in parts.items():
                found = measure(part, split_dir)
                print(f"{size:>10,} {name:<8}" + "".join(f"{figure:>9,.2f}" for figure in found.values()), flush=True)


if __name__ == "__main__":
    main()

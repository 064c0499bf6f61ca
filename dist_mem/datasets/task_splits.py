"""Data directories of generated tasks: drawn from a seed, disjoint splits, finished splits kept.

Data flow: a builder's `Task` -> build_task -> <out>/{train,validation,test} in the format of every dataset.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from dist_mem.data.metadata import ShardError
from dist_mem.data.shard import INDEX_NAME, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata, save_tokenizer
from dist_mem.datasets.hash_split import SPLITS, split_of
from dist_mem.datasets.options import positive

FRACTIONS = {"train": 0.8, "validation": 0.1, "test": 0.1}  # of all examples that a task can draw
DrawnT = TypeVar("DrawnT")


class Task(NamedTuple):
    """What a data directory contains; `documents` yields any number of documents of a split."""

    name: str
    recipe: str  # everything that the documents of a split depend on, but split and count
    tokenizer: Tokenizer
    documents: Callable[[str], Iterator[TokenizedDocument]]
    what: str = "documents"  # in messages


def add_task_options(
    parser: argparse.ArgumentParser,
    *,
    out: str,
    lengths: int,
    train: int = 8000,
    held_out: int = 800,
    published: str = "",
) -> None:
    """Add the options of every generated task.

    Args:
        out, lengths: defaults; train, held_out: of the number of documents in train, and in each other split.
        published: said beside those numbers.
    """
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="holds one data directory a length (default: %(default)s)")
    help = f"in tokens (default: {lengths})"
    add("--lengths", type=positive, nargs="+", default=[lengths], metavar="N", help=help)
    for split in SPLITS:
        default = train if split == "train" else held_out
        help = f"documents (default: %(default)s{published})"
        add(f"--{split}", type=positive, default=default, metavar="N", help=help)
    add("--seed", type=int, default=0, help="of all documents (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out")


def build_task(task: Task, out: Path, *, counts: dict[str, int], overwrite: bool) -> None:
    """Write the tokenizer and all splits of a data directory, and keep those that exist already.

    Raises:
        ValueError: `out` holds another build.
    """
    for split in SPLITS if overwrite else ():
        (out / split / INDEX_NAME).unlink(missing_ok=True)  # without its index, a split does not exist
    if (out / JSON_NAME).exists() and not overwrite:
        if read_tokenizer_metadata(out)["fingerprint"] != task.tokenizer.fingerprint:
            raise ValueError(f"{out} holds another dataset: give another --out, or --overwrite")
    else:
        save_tokenizer(task.tokenizer, out)
    for split, count in counts.items():
        _build_split(task, out / split, count)


def counts_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the number of documents of each split, from the options of `add_task_options`."""
    return {split: getattr(options, split) for split in SPLITS}


def draw_of_split(split: str, draw: Callable[[], DrawnT], key: Callable[[DrawnT], str]) -> DrawnT:
    """Draw until an example belongs to a split: a checksum of its key decides, so that no key is in two splits.

    The key must contain all that is to be remembered. Its checksum is even over all of its parts, so that a model sees
    every digit of a number, say, in training.

    Raises:
        ValueError: 10,000 draws give none; the task has too few examples.
    """
    for _ in range(10_000):
        drawn = draw()
        if split_of(key(drawn), FRACTIONS) == split:
            return drawn
    raise ValueError(f"no example for {split} in 10,000 draws: the task has too few; give it more to draw from")


def _build_split(task: Task, split_dir: Path, count: int) -> None:
    from tqdm import tqdm

    split, where = split_dir.name, f"{split_dir.parent.name} {split_dir.name}"
    recipe = task.recipe.format(count=count)
    if _is_built(split_dir, recipe):
        print(f"{where}: already built, kept", flush=True)
        return
    documents = islice(task.documents(split), count)
    bar = tqdm(documents, total=count, desc=where, unit="doc", leave=False, disable=None)
    fingerprint = task.tokenizer.fingerprint
    write_split(bar, split_dir, name=task.name, split=split, tokenizer_fingerprint=fingerprint, recipe=recipe)
    print(f"{where}: {count} {task.what}", flush=True)


def _is_built(split_dir: Path, recipe: str) -> bool:
    if not (split_dir / INDEX_NAME).exists():
        return False
    try:
        index = read_index(split_dir)
    except ShardError as error:
        raise ValueError(f"{error}; here that is: give another --out, or --overwrite") from error
    if index.recipe != recipe:
        raise ValueError(
            f"{split_dir} was built otherwise ({index.recipe}; now: {recipe}): give another --out, or --overwrite"
        )
    tars = {path.name: path.stat().st_size for path in split_dir.glob("*.tar")}
    return all(tars.get(shard.name) == shard.bytes for shard in index.shards)

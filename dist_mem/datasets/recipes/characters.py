"""Build enwik8 and text8 (Mahoney 2006): one token per byte, 90 / 5 / 5 million tokens.

    curl -O http://mattmahoney.net/dc/enwik8.zip && unzip enwik8.zip
    dist-mem data build characters --source enwik8 --out data/enwik8
    dist-mem data build characters --source text8 --out data/text8

The content shows which file it is: text8 has only a to z and spaces. The splits are the published
ones, each a single document, for the layout `stream`. `dist-mem evaluate` reports bits per byte,
which the papers call bits per character.

The published counts (LaMemo, table 4) are those of Transformer-XL's preparation, and the counts
here are the same:
- enwik8 88,982,818 / 4,945,742 / 4,943,417: the 1,128,023 newlines are lost, because that
  preparation reads line by line and adds nothing at line ends. `--newlines keep` keeps them:
  90,000,000 / 5,000,000 / 5,000,000, as in other papers.
- text8 89,999,999 / 4,999,999 / 5,000,000: spaces at the ends of a split are stripped, one in train
  and one in validation.

The vocabulary is fixed: 256 bytes and BOS; the published ones have only the 204 bytes or 27 letters
that occur.
"""

from __future__ import annotations

import argparse
import hashlib
from itertools import pairwise
from pathlib import Path

from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.options import add_build_options, check_paths
from dist_mem.datasets.source import FileSlice, SourceDocument
from dist_mem.runtime.files import read_at_most, sha256_of

NUM_BYTES = 100_000_000  # of the file
HELD_OUT = 5_000_000  # of validation, and of test after it
LETTERS = b" abcdefghijklmnopqrstuvwxyz"
OFFICIAL_MD5 = {  # from mattmahoney.net/dc/textdata.html
    "enwik8": "a1fa5ffddb56f4953e226637dabbb36a",
    "text8": "3bea1919949baf155f99411df5fada7e",
}
OFFICIAL_TOKENS = {  # LaMemo, table 4
    "enwik8": {"train": 88_982_818, "validation": 4_945_742, "test": 4_943_417},
    "text8": {"train": 89_999_999, "validation": 4_999_999, "test": 5_000_000},
}


def build(options: argparse.Namespace) -> None:
    """Detect the corpus, split it, compare the counts with the published ones, and build."""
    check_paths(options.source)
    content = read_whole(options.source)
    corpus = "enwik8" if content.translate(None, LETTERS) else "text8"
    without = b"\n" if corpus == "enwik8" and options.newlines == "drop" else b""
    sha256 = sha256_of(options.source)
    splits = {}
    for split, (start, stop) in split_bounds(content, strip=corpus == "text8").items():
        source = FileSlice(options.source, start, stop, sha256, without)
        splits[split] = [SourceDocument(split, f"{corpus}, {split} split", source)]
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != OFFICIAL_MD5[corpus]:
        print(f"not the official {corpus} (MD5 {md5}): there are no counts to compare with", flush=True)
    elif without or corpus == "text8":
        check_counts(corpus, splits)
    build_dataset(
        splits,
        options.out,
        name=options.name or corpus,
        tokenizer_kind="bytes",
        workers=options.workers,
        overwrite=options.overwrite,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="the file enwik8 or text8, unpacked")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", help="of the dataset, part of the tars' names (default: enwik8 or text8)")
    add("--newlines", choices=("drop", "keep"), default="drop", help="of enwik8 (default: %(default)s, as published)")


def read_whole(path: Path) -> bytes:
    """Return the content of the file. Raise ValueError if it cannot be enwik8 or text8."""
    if path.is_dir():
        raise ValueError(f"--source {path} is a folder: give the file in it, enwik8 or text8")
    content = read_at_most(path)
    if content.startswith(b"PK\x03\x04"):
        raise ValueError(f"--source {path} is a zip archive: unpack it first (unzip {path.name})")
    if len(content) != NUM_BYTES:
        raise ValueError(f"{path} has {len(content):,} bytes, but enwik8 and text8 have {NUM_BYTES:,}: fetch it again")
    return content


def split_bounds(content: bytes, *, strip: bool) -> dict[str, tuple[int, int]]:
    """Return the first byte of each split and the one after its last; `strip`: without the spaces at its ends."""
    edges = [0, NUM_BYTES - 2 * HELD_OUT, NUM_BYTES - HELD_OUT, NUM_BYTES]
    bounds = {}
    for split, (start, stop) in zip(("train", "validation", "test"), pairwise(edges), strict=True):
        while strip and start < stop and content[start : start + 1] == b" ":
            start += 1
        while strip and start < stop and content[stop - 1 : stop] == b" ":
            stop -= 1
        bounds[split] = start, stop
    return bounds


def check_counts(corpus: str, splits: dict[str, list[SourceDocument]]) -> None:
    """Raise ValueError if the number of tokens of a split is not the published one."""
    for split, (document,) in splits.items():
        assert isinstance(document.source, FileSlice)
        found, published = len(document.source.read()), OFFICIAL_TOKENS[corpus][split]
        if found != published:
            raise ValueError(f"{split}: {found:,} tokens, but {corpus} has {published:,}: the preparation is at fault")
        print(f"{split}: {published:,} tokens, as published for {corpus}", flush=True)

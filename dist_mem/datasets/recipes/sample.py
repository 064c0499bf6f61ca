"""Build the sample library: generated books whose names recur, as texts and as shards.

    dist-mem data build sample --out data/sample
    dist-mem data build sample --out data/sample --books 1000 --seed 1

<out>/texts has {train,validation,test}/<id>.txt and metadata.csv, as `data build pg19` reads them;
the shards in <out> have the same books with their recall distances. The same options always produce
the same bytes.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import NamedTuple

from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.options import add_build_options, positive
from dist_mem.datasets.sample_library import SampleBook, write_book
from dist_mem.datasets.source import SourceDocument, read_text
from dist_mem.errors import UnusableError
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.locks import hold_folder


class LibrarySize(NamedTuple):
    books: dict[str, int]  # split -> books
    shortest: int  # tokens of a book, about
    longest: int  # tokens; most books are much nearer the shortest


SIZES = {
    "demo": LibrarySize({"train": 320, "validation": 32, "test": 32}, shortest=2_000, longest=20_000),
    "tiny": LibrarySize({"train": 16, "validation": 4, "test": 4}, shortest=1_000, longest=2_000),
}
VOCAB_SIZE = 1280  # the smallest multiple of 256 at which every recalled word is one token
METADATA_NAME = "metadata.csv"
OWN_ROW = re.compile(r"(\d+),.*,\d+,")  # of metadata.csv: id, title, year, and no address
FIRST_IDS = {"train": 1001, "validation": 8001, "test": 9001}


def build(options: argparse.Namespace) -> None:
    """Write the library, its shards, and its texts."""
    find_texts(options.out / "texts")  # refuses texts of something else
    size = SIZES[options.size]
    counts = {**size.books, "train": options.books or size.books["train"]}
    if (most := FIRST_IDS["validation"] - FIRST_IDS["train"]) < counts["train"]:
        raise UnusableError(f"--books {counts['train']}: {most} at most, so that each book has an id of its own")
    library = {split: write_split(split, count, size, seed=options.seed) for split, count in counts.items()}
    splits = {
        split: [
            SourceDocument(id=book_id, title=book.title, source=book.text, year=book.year, recall=book.recall)
            for book_id, book in books.items()
        ]
        for split, books in library.items()
    }
    build_dataset(
        splits,
        options.out,
        name="sample",
        vocab_size=options.vocab_size,
        workers=options.workers,
        overwrite=options.overwrite,
    )
    with hold_folder(options.out / "texts", f"--out {options.out}"):
        write_texts(library, options.out / "texts")  # last: build_dataset first refuses to replace another library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    size_help = "of SentencePiece (default: %(default)s)"
    add("--vocab-size", type=positive, default=VOCAB_SIZE, metavar="N", help=size_help)
    add("--out", type=Path, default=Path("data/sample"), help="data directory to build (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the whole library (default: %(default)s)")
    add("--size", choices=tuple(SIZES), default="demo", help="tiny: for tests (default: %(default)s)")
    add("--books", type=positive, metavar="N", help="of the train split, instead of those of --size")


def write_split(split: str, count: int, size: LibrarySize, *, seed: int) -> dict[str, SampleBook]:
    """Return the books of a split by id. Book k of a split does not depend on the number of books."""
    books = {}
    for number in range(FIRST_IDS[split], FIRST_IDS[split] + count):
        draw = random.Random(f"dist_mem sample library {seed} {split} {number}")
        num_tokens = int(size.shortest * (size.longest / size.shortest) ** (draw.random() ** 4))
        books[str(number)] = write_book(draw, num_tokens=num_tokens)
    return books


def write_texts(library: dict[str, dict[str, SampleBook]], folder: Path) -> None:
    """Write {train,validation,test}/<id>.txt and metadata.csv, as in PG-19; remove other books of the library."""
    books = [(folder / split / f"{book_id}.txt", book) for split in library for book_id, book in library[split].items()]
    for path in set(find_texts(folder)) - {path for path, _ in books}:
        path.unlink()
    for split in library:
        (folder / split).mkdir(parents=True, exist_ok=True)
    # First: the next call finds by it the texts that a killed one has written
    write_text(folder / METADATA_NAME, csv_text([path.stem, book.title, book.year, ""] for path, book in books))
    for path, book in books:
        write_text(path, book.text)


def find_texts(folder: Path) -> list[Path]:
    """Return the texts that an earlier call has written into a folder.

    Raises:
        UnusableError: there are others, which this call would remove or replace.
    """
    path = folder / METADATA_NAME
    rows = [OWN_ROW.fullmatch(row) for row in read_text(path).splitlines()] if path.exists() else []
    ids = {row[1] for row in rows if row}
    texts = [path for split in FIRST_IDS for path in sorted((folder / split).glob("*.txt"))]
    others = [text for text in texts if text.stem not in ids] + ([] if all(rows) else [path])
    if others:
        raise UnusableError(f"{others[0]} is not of the sample library, and would be lost: give another --out")
    return texts

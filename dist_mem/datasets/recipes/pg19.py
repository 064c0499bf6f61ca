"""Build PG-19 (Rae et al. 2020), or any corpus with its layout.

    dist-mem data build pg19 --source pg19 --out data/pg19 --download      # 11.7 GB
    dist-mem data build pg19 --source pg19 --out data/pg19 --vocab-size 8000 --workers 8

The layout is the original one: <source>/{train,validation,test}/<id>.txt, UTF-8, and
<source>/metadata.csv, whose rows are id, title, year, url, without a header. A document that is not
in metadata.csv has its id as title and no year. metadata.csv is optional, and so are single splits.
Provenance and licences: shards/README.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.remote.fetch import METADATA_BYTES, Address, show
from dist_mem.data.remote.fetch import download as fetch
from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.datasets.bucket_download import SOURCE_KEY, download_files, list_files
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.corpus_rows import TEXT_SUFFIX
from dist_mem.datasets.options import add_build_options, add_tokenizer_options, check_paths, positive, vocab_size_of
from dist_mem.datasets.source import SourceDocument, read_text
from dist_mem.datasets.split_names import NO_WORDS, split_named, words_digest
from dist_mem.datasets.tree import listed_files
from dist_mem.runtime.locks import hold_folder
from dist_mem.runtime.progress import show_count

BUCKET_URL = "https://storage.googleapis.com/deepmind-gutenberg"
METADATA_NAME = "metadata.csv"
ROW_SHOWN = 100  # characters of a row in a message


class OfficialSplit(NamedTuple):
    num_documents: int
    num_words: int  # divisor of published word-level perplexities (README of github.com/google-deepmind/pg19)
    ids_sha256: str  # `digest_ids` of the complete split


OFFICIAL_SPLITS = {
    "train": OfficialSplit(28_602, 1_973_136_207, "a46a7b256d23bf50e908c0b558a68a7dac275d8f6d4fe0515e3cf5f3da883833"),
    "validation": OfficialSplit(50, 3_007_061, "637dc174e9e4b3afc7b550e3c11bc589dfbfedc18a2f02ba90a7c06620c85eb1"),
    "test": OfficialSplit(100, 6_966_499, "afedfb3fd2e630e8f0efc13922d88b4ec59ee41fe16d0164b9526e140e205fe6"),
}
OFFICIAL_METADATA = "ff09d0b9a78f4be54bd06bc0367135cbe717d2f2f227f8d907f5803fcc56f27f"  # `digest_ids` of its ids


class BookMetadata(NamedTuple):
    row: int  # place in metadata.csv
    title: str
    year: int | None


def build(options: argparse.Namespace) -> None:
    """Fetch what is missing, list the documents, and build."""
    check_paths(None if options.download else options.source)
    vocab_size = vocab_size_of(options)
    tokenizer = options.tokenizer_from and find_tokenizer(options.tokenizer_from)
    if options.download:
        download(options)
    metadata = read_metadata(options.source / METADATA_NAME)
    check_split_folders(options.source)
    splits = {
        split: read_split(options.source / split, metadata, order=options.order, limit=split_limit(split, options))
        for split in OFFICIAL_SPLITS
        if (options.source / split).is_dir()
    }
    if not splits:
        raise ValueError(f"{options.source} has none of the folders {', '.join(OFFICIAL_SPLITS)}: check --source")
    refuse_shared_books(splits, metadata)
    build_dataset(
        splits,
        options.out,
        name=options.name,
        tokenizer_kind=options.tokenizer,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        workers=options.workers,
        seed=options.seed,
        official_words=official_words(splits),
        overwrite=options.overwrite,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="folder of the texts; --download fills it")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", default="pg19", help="of the dataset, part of the tars' names (default: %(default)s)")
    add("--limit", type=positive, metavar="N", help="only the first N documents of every split, in --order")
    add("--first", type=positive, metavar="N", help="only the first N documents of the train split, in --order")
    add(
        "--order",
        choices=("id", "text", "metadata"),
        default="id",
        help="order of documents: by number (other ids last), by file name as ls does, "
        "or as in metadata.csv (documents not in it last) (default: %(default)s)",
    )
    add_tokenizer_options(parser, "sentencepiece", "bytes", vocab_size=32_000)
    add("--seed", type=int, default=0, help="of the lines SentencePiece is trained on (default: %(default)s)")
    add("--download", action="store_true", help="first fetch what is missing in --source")
    add("--base-url", default=BUCKET_URL, metavar="URL", help="bucket to download from (default: %(default)s)")


def download(options: argparse.Namespace) -> None:
    """Fetch metadata.csv and the documents that the other options select.

    Raises:
        UnusableError: another command fills the folder.
        RemoteError: a file cannot be fetched.
    """
    with hold_folder(options.source, f"{SOURCE_KEY} {options.source}"):
        url, path = f"{options.base_url.rstrip('/')}/{METADATA_NAME}", options.source / METADATA_NAME
        fetch(Address(url, show(url)), path, limit=METADATA_BYTES, verify=read_metadata, key=SOURCE_KEY)
        metadata = read_metadata(path)
        for split in OFFICIAL_SPLITS:
            listed = {file.name: file for file in list_files(options.base_url, f"{split}/")}
            ids = [match[1] for name in listed if (match := re.fullmatch(rf"{split}/([^/]+)\.txt", name))]
            chosen = choose(ids, metadata, order=options.order, limit=split_limit(split, options))
            print(f"{split}: downloading {len(chosen)} of {len(ids)} documents", flush=True)
            files = [listed[f"{split}/{document_id}.txt"] for document_id in chosen]
            download_files(options.base_url, files, options.source)


def read_metadata(path: Path) -> dict[str, BookMetadata]:
    """Return the rows by document id; empty if there is no such file.

    Raises:
        ValueError: a row is not id, title, year, url on one line, its quotation marks are wrong, or an id is repeated.
    """
    if not path.exists():
        return {}
    metadata: dict[str, BookMetadata] = {}
    number = 0
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for number, row in enumerate(rows, start=1):
            if len(row) != 4 or not re.fullmatch(r"(-?\d+)?", row[2]):
                raise ValueError(f"{path}, row {number}: {_shorten_row(row)} is not id, title, year, url")
            if any("\n" in field or "\r" in field for field in row):
                raise ValueError(
                    f"{path}, row {number}: {_shorten_row(row)} contains a line end: close its quotation mark"
                )
            if row[0] in metadata:
                raise ValueError(f"{path}, row {number}: id {row[0]} comes twice")
            metadata[row[0]] = BookMetadata(number, row[1], int(row[2]) if row[2] else None)
    except csv.Error as error:
        raise ValueError(
            f"{path}, row {number + 1}: {error}: close its quotation mark; in a quoted title, write two for one"
        ) from error
    return metadata


def _shorten_row(row: list[str]) -> str:
    return f"{str(row)[:ROW_SHOWN]}..." if len(str(row)) > ROW_SHOWN else str(row)


def check_split_folders(source: Path) -> None:
    """Raise ValueError if a folder is named as a split, but not as in PG-19: its texts would not be read."""
    for path in sorted(source.iterdir()):
        split = split_named(path.name)
        if split is not None and path.name not in OFFICIAL_SPLITS and path.is_dir():
            raise ValueError(f"{path} is no folder of PG-19: name it {split}, or move it elsewhere")


def read_split(
    folder: Path, metadata: dict[str, BookMetadata], *, order: str, limit: int | None
) -> list[SourceDocument]:
    """Return the documents of a folder, in `order`, at most `limit`."""
    files = listed_files(folder, TEXT_SUFFIX)
    chosen = choose(files, metadata, order=order, limit=limit)
    unnamed = sum(document_id not in metadata for document_id in chosen)
    if unnamed:
        print(
            f"{folder.name}: {unnamed} of {len(chosen)} documents are not in {METADATA_NAME}; their title is their id"
        )
    documents = []
    for document_id in chosen:
        known = metadata.get(document_id, BookMetadata(0, document_id, None))
        documents.append(SourceDocument(document_id, known.title, files[document_id], known.year))
    return documents


def refuse_shared_books(splits: dict[str, list[SourceDocument]], metadata: dict[str, BookMetadata]) -> None:
    """Raise ValueError if two splits share a book: the scores of a book that was trained on are meaningless.

    Books of metadata.csv are compared by id, as other ids may be numbers that restart in each split, and all texts by
    their words, but those of PG-19 itself.
    """
    is_official = digest_ids(metadata) == OFFICIAL_METADATA
    first: dict[str | bytes, tuple[str, SourceDocument]] = {}
    for split, documents in splits.items() if len(splits) > 1 else ():
        for document in show_count(documents, f"{split}: comparing", total=len(documents), unit="documents"):
            keys: list[str | bytes] = [document.id] if document.id in metadata else []
            if not (keys and is_official) and (digest := words_digest(document.text())) != NO_WORDS:
                keys.append(digest)
            for key in keys:
                other, same = first.setdefault(key, (split, document))
                if other != split:
                    raise ValueError(_shared_book(other, same, split, document))


def _shared_book(other: str, same: SourceDocument, split: str, document: SourceDocument) -> str:
    found = f"document {same.id} of {other} and document {document.id} of {split} have one text", ""
    if same.id == document.id:
        found = f"document {same.id} is in {other} and in {split}", ", or rename one if they are different books"
    return f"{found[0]} ({same.source}, {document.source}): leave it in one of them{found[1]}"


def digest_ids(ids: Iterable[str]) -> str:
    """Return what identifies a set of books."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def choose(ids: Iterable[str], metadata: dict[str, BookMetadata], *, order: str, limit: int | None) -> list[str]:
    """Return the first `limit` ids in an order that does not depend on the file system.

    Raises:
        ValueError: order is "metadata", but there is no metadata.
    """
    if order == "metadata" and not metadata:
        raise ValueError(f"--order metadata needs {METADATA_NAME} in --source; without it, order by id or text")

    def place(document_id: str) -> tuple[float, str]:
        number = float("inf")
        if order == "id" and document_id.isdecimal():
            number = int(document_id)
        elif order == "metadata" and document_id in metadata:
            number = metadata[document_id].row
        return number, f"{document_id}.txt"

    return sorted(ids, key=place)[:limit]


def split_limit(split: str, options: argparse.Namespace) -> int | None:
    limits = [options.limit, options.first if split == "train" else None]
    return min((limit for limit in limits if limit is not None), default=None)


def official_words(splits: dict[str, list[SourceDocument]]) -> dict[str, int]:
    """Return the published word counts of the complete splits."""
    counts = {}
    for split, documents in splits.items():
        if digest_ids(document.id for document in documents) == OFFICIAL_SPLITS[split].ids_sha256:
            counts[split] = OFFICIAL_SPLITS[split].num_words
    return counts

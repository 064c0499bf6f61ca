"""Build your own corpus: .txt files, or rows of JSON lines or Parquet.

    dist-mem data build text --source corpus --out data/mine        # corpus/{train,validation,test}
    dist-mem data build text --source web.jsonl.zst --out data/web --text-field body --workers 8
    dist-mem data build text --source essays letters --out data/mine --validation 0.05 --test 0.05

--source takes .txt (UTF-8), JSON lines (.jsonl, .ndjson, also .gz and .zst; .json.gz, .json.zst),
.parquet files, and folders of them at any depth.
Hidden files and other suffixes are passed over, and counted.

Splits are what the names of folders and files say, at any depth: train/, test.jsonl, valid.txt,
data/validation-00000-of-00001.parquet (also val, dev, eval, training, ...); of several sources,
also those of the folders above them, up to the one that they share. Without such names, or with
--split-by-hash, a checksum of a document's id determines its split. Of rows it does so alone,
whatever other rows are added or removed, and fractions are approximate; of .txt files fractions are
exact numbers, in the order of the checksums.

The id of a row is its field id, else the name of its file and its number; the id of a .txt file is
its path under --source. No text may be in two splits; neither white space makes a difference, nor
the form of accents, nor characters without a glyph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dist_mem.data.shard import check_names
from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.corpus import (
    CorpusDocuments,
    by_name,
    find_files,
    read_documents,
    text_title,
    without_shared_texts,
)
from dist_mem.datasets.corpus_rows import TEXT_SUFFIX
from dist_mem.datasets.options import add_build_options, add_tokenizer_options, check_paths, vocab_size_of
from dist_mem.datasets.split_names import DEFAULT_FRACTIONS, SPLITS, parse_fractions, split_of, splits_of
from dist_mem.datasets.tree import suffix_of
from dist_mem.errors import UnusableError
from dist_mem.runtime.terminal import count_noun

DEAL_ALL = "--split-by-hash, which deals out all documents"
DEFAULT = ",".join(f"{split}={fraction}" for split, fraction in DEFAULT_FRACTIONS.items())


def build(options: argparse.Namespace) -> None:
    """Read the corpus, assign its documents to splits, and build."""
    for split in SPLITS:
        check_names(options.name, split)  # before hours of reading
    vocab_size = vocab_size_of(options)
    tokenizer = options.tokenizer_from and find_tokenizer(options.tokenizer_from)
    build_dataset(
        without_shared_texts(read_splits(options), drop=options.drop_duplicates),
        options.out,
        name=options.name,
        tokenizer_kind=options.tokenizer,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        workers=options.workers,
        seed=options.seed,
        overwrite=options.overwrite,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    add("--source", type=Path, required=True, nargs="+", help="folders or files")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", default="text", help="of the dataset, part of the tars' names (default: %(default)s)")
    add("--text-field", default="text", metavar="NAME", help="of a row: its text (default: %(default)s)")
    add("--id-field", metavar="NAME", help="of a row: its id (default: id, in rows that have it)")
    help = f"deal out documents by their ids (default: {DEFAULT}, where no folders are splits)"
    add("--split-by-hash", type=fractions, metavar="SPLIT=FRACTION,...", help=help)
    add("--split-seed", type=int, metavar="N", help="deal them out, and differently for each seed")
    add("--validation", type=share, default=0.0, metavar="FRACTION", help="short for --split-by-hash; train: the rest")
    add("--test", type=share, default=0.0, metavar="FRACTION", help="likewise")
    add(
        "--drop-duplicates",
        action="store_true",
        help="keep a text of several splits only in the first one (order: train, validation, test)",
    )
    add_tokenizer_options(parser, "sentencepiece", "bytes", vocab_size=8_000)
    add("--seed", type=int, default=0, help="of the lines SentencePiece is trained on (default: %(default)s)")


def fractions_of(options: argparse.Namespace) -> dict[str, float] | None:
    """Return the fractions by which documents are dealt out; None if folders that are splits come first.

    Raises:
        UnusableError: --validation and --test contradict each other or --split-by-hash.
    """
    if not options.validation and not options.test:
        return options.split_by_hash or (DEFAULT_FRACTIONS if options.split_seed is not None else None)
    if options.split_by_hash:
        raise UnusableError("--validation and --test are short for --split-by-hash: give one or the other")
    if options.validation + options.test >= 1:
        raise UnusableError("--validation and --test leave nothing to train on: together they must be less than 1")
    rest = 1 - options.validation - options.test
    return {"train": rest, "validation": options.validation, "test": options.test}


def fractions(text: str) -> dict[str, float]:
    """Parse the value of --split-by-hash."""
    try:
        return parse_fractions(text)
    except UnusableError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def share(text: str) -> float:
    """Parse an option's value, from 0 to less than 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction: give a number from 0 to less than 1")
    return value


def read_splits(options: argparse.Namespace) -> dict[str, CorpusDocuments]:
    """Read the documents of each split, in the order train, validation, test, others.

    Raises:
        UnusableError: as `read_documents`; or a split that has a fraction gets no document.
    """
    given = fractions_of(options)
    check_paths(*options.source)
    corpus = find_files(options.source)
    is_short = bool(options.validation or options.test)
    named = None if given and not is_short else by_name(corpus, fix=f"give {DEAL_ALL}")
    dealt = given or DEFAULT_FRACTIONS
    if named is not None and is_short:
        split, files = list(named.items())[-1]
        path = next(iter(files.values()))
        raise UnusableError(f"{path} is named as of {split}: leave out --validation and --test, or give {DEAL_ALL}")
    if named is not None:
        counts = ", ".join(f"{split} {count_noun(len(files), 'file')}" for split, files in named.items())
        print(f"splits by the names of folders and files: {counts}", flush=True)
    elif not given:
        print(f"no name says train, validation or test: documents are dealt out by their ids, {DEFAULT}", flush=True)
    titles = [text_title(name) for name in corpus if suffix_of(name, (TEXT_SUFFIX,))]
    files_dealt = splits_of(titles, dealt, options.split_seed)
    splits = read_documents(
        {"": corpus} if named is None else named,
        lambda title: files_dealt.get(title) or split_of(title, dealt, options.split_seed),
        text_field=options.text_field,
        id_field=options.id_field,
    )
    num_documents = sum(len(documents) for documents, _ in splits.values())
    if not num_documents:
        raise UnusableError(f"--source {' '.join(map(str, options.source))}: its files have no rows")
    missing = [split for split in SPLITS if named is None and dealt.get(split) and split not in splits]
    if missing and num_documents < len([split for split in SPLITS if dealt.get(split)]):
        raise UnusableError(
            f"{count_noun(num_documents, 'document')} cannot be dealt out to {', '.join(dealt)}: cut the text into "
            "more files, or give --split-by-hash train=1"
        )
    if missing:
        raise UnusableError(
            f"of {num_documents} documents none falls to {missing[0]}: give it a larger fraction by --split-by-hash, "
            f"or put the files into folders named {', '.join(SPLITS)}"
        )
    return {split: splits[split] for split in [*SPLITS, *sorted(splits.keys() - set(SPLITS))] if split in splits}

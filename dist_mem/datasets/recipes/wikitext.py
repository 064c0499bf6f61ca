"""Build WikiText-103 and WikiText-2 (Merity et al. 2016) from the official token files.

    dist-mem data build wikitext --source wikitext-103 --out data/wikitext103 --workers 8
    dist-mem data build wikitext --source wikitext-103 --out data/pieces --tokenizer sentencepiece
    dist-mem data build wikitext --source other --out data/other --tokenizer-from data/wikitext103

<source> has wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or some of them. The
vocabulary is that of the train file; without this file, --tokenizer-from takes the tokenizer of
another data directory.

Words are counted as in the papers: everything between white space, and each line end, which is the
word <eos>. The validation file has 217,646 words and the test file 245,569. Word-level perplexity
divides by these numbers, whatever the tokens are. With --tokenizer words (the most frequent first,
as adaptive softmax requires), tokens and words are the same; the published preparation has the same
words, but with <eos> first.

An article is a document. The layout `stream` concatenates documents with nothing between them (BOS
is read once, before the first token), so that tokens and counts are those of the papers.
Provenance: shards/README.md.
"""

from __future__ import annotations

import argparse
import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.data.tokenizers.words import WordTokenizer, count_words
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.options import add_build_options, add_tokenizer_options, check_paths, vocab_size_of
from dist_mem.datasets.source import FileSlice, SourceDocument, check_text
from dist_mem.runtime.files import sha256_of
from dist_mem.runtime.progress import show_count

FILE_NAMES = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
# Words with <eos>: LaMemo, table 4 (WikiText-103); Merity et al., table 1, and its line ends (WikiText-2).
OFFICIAL_WORDS = {
    "WikiText-103": {"train": 103_227_021, "validation": 217_646, "test": 245_569},
    "WikiText-2": {"train": 2_088_628, "validation": 217_646, "test": 245_569},
}
OFFICIAL_FILES = {
    "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b": ("WikiText-103", "validation"),
    "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9": ("WikiText-103", "test"),
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8": ("WikiText-2", "validation"),
    "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0": ("WikiText-2", "test"),
}
CHECKED_BYTES = 2**16  # of a file, to see whether it is text
HEADING = re.compile(r" = (?!=)(.*\S) = \n")  # of an article; those of its sections have more equals signs


class Article(NamedTuple):
    start: int  # byte in the file
    title: str


class TokenFile(NamedTuple):
    """One of the files, read once."""

    path: Path
    start: int  # byte where the text begins: after the byte order mark (U+FEFF) that some editors add
    num_bytes: int
    num_words: int  # line ends included
    articles: list[Article]
    sha256: str


def build(options: argparse.Namespace) -> None:
    """Read the files once, compare their counts with the published ones, and build."""
    check_paths(options.source)
    vocab_size = vocab_size_of(options)
    tokenizer = options.tokenizer_from and find_tokenizer(options.tokenizer_from)
    paths = {split: options.source / name for split, name in FILE_NAMES.items() if (options.source / name).is_file()}
    if not paths:
        raise ValueError(f"{options.source} has none of the files {', '.join(FILE_NAMES.values())}: check --source")
    if options.tokenizer != "bytes" and tokenizer is None and "train" not in paths:
        raise ValueError(
            f"{options.source} has no {FILE_NAMES['train']}, and the vocabulary comes from it alone: add it, or give "
            "--tokenizer-from DIR, a data directory that was built with it"
        )
    files = {split: scan(path) for split, path in paths.items()}
    check_counts(files)
    if options.tokenizer == "words" and tokenizer is None:
        tokenizer = count_vocabulary(paths["train"])
    build_dataset(
        {split: documents_of(file, by=options.documents) for split, file in files.items()},
        options.out,
        name=options.name,
        tokenizer_kind=options.tokenizer,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        workers=options.workers,
        seed=options.seed,
        official_words={split: file.num_words for split, file in files.items()},
        overwrite=options.overwrite,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="folder of the wiki.*.tokens files")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", default="wikitext", help="of the dataset, part of the tars' names (default: %(default)s)")
    add_tokenizer_options(parser, "words", "sentencepiece", "bytes", vocab_size=32_000)
    add(
        "--documents",
        choices=("articles", "split"),
        default="articles",
        help="what a document is; the layout `stream` reads the same either way, but a whole split takes some 20 times "
        "its size in memory (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the lines SentencePiece is trained on (default: %(default)s)")


def scan(path: Path) -> TokenFile:
    """Count the words of a file and find its articles: headings between blank lines.

    Raises:
        ValueError: the file is empty, not UTF-8, or has line ends of Windows.
    """
    with path.open("rb") as stream:
        start = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
    num_words, articles, position = 0, [], start
    candidate: Article | None = None
    is_after_blank = True
    for line in lines_of(path):
        if line.endswith("\r\n"):
            raise ValueError(
                f"{path} has line ends of Windows (CRLF), with which no heading of an article is one: convert it to LF "
                "(dos2unix)"
            )
        words = line.split()
        num_words += len(words) + line.endswith("\n")
        if candidate is not None and not words:
            articles.append(candidate)
        heading = HEADING.fullmatch(line) if is_after_blank else None
        candidate = Article(position, heading[1]) if heading else None
        is_after_blank = not words
        position += len(line.encode())
    if position == start:
        raise ValueError(f"{path} is empty")
    return TokenFile(path, start, position, num_words, articles, sha256_of(path))


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends, without a byte order mark; only LF ends a line."""
    with path.open("rb") as file:
        check_text(file.read(CHECKED_BYTES), f"{path}, at its begin,")
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as stream:
            yield from show_count(stream, f"reading {path.name}", unit="lines")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): fetch it again") from error


def check_counts(files: dict[str, TokenFile]) -> None:
    """Compare the counts with the published ones, if an official file identifies the corpus.

    Raises:
        ValueError: the files are of two corpora, or the word count of one is not the published one.
    """
    corpora = {OFFICIAL_FILES[file.sha256][0] for file in files.values() if file.sha256 in OFFICIAL_FILES}
    if not corpora:
        print("not the official validation or test file: there are no counts to compare with", flush=True)
        return
    if len(corpora) > 1:
        paths = ", ".join(str(file.path) for file in files.values())
        raise ValueError(
            f"{paths}: these are files of {' and of '.join(sorted(corpora))}; put each into its own folder"
        )
    corpus = corpora.pop()
    for split, file in files.items():
        published = OFFICIAL_WORDS[corpus][split]
        if file.num_words != published:
            raise ValueError(
                f"{file.path} has {file.num_words:,} words with <eos>, but {corpus} has {published:,}: fetch it again"
            )
        print(f"{split}: {published:,} words with <eos>, as published for {corpus}", flush=True)


def documents_of(file: TokenFile, *, by: str) -> list[SourceDocument]:
    """Return a file as documents: its articles, or all of it as one. Concatenated, they are its text byte for byte."""
    articles = file.articles if by == "articles" and file.articles else [Article(file.start, file.path.name)]
    starts = [file.start, *(article.start for article in articles[1:]), file.num_bytes]
    return [
        SourceDocument(f"{number:05d}", article.title, FileSlice(file.path, start, stop, file.sha256))
        for number, (article, start, stop) in enumerate(zip(articles, starts, starts[1:], strict=False), start=1)
    ]


def count_vocabulary(path: Path) -> WordTokenizer:
    """Return a tokenizer of all words of the train file."""
    tokenizer = count_words(line.removesuffix("\n") for line in lines_of(path))
    print(f"tokenizer: {len(tokenizer.words):,} words", flush=True)
    return tokenizer

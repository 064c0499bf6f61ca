"""Documents of a task in text: a question about a place far back, whose answer ends the document and is scored alone.

Data flow: a builder's `Question` -> fitted (as much haystack as the length allows) -> document_of -> a builder's `Task`
-> build_tasks -> <out>/{train,validation,test} in the format of every dataset. Splits are drawn from a seed and
disjoint; finished ones are kept.

A haystack yields the sentences of a document without end: the published repeat, a user's books, or the sample library.
Books of one split are never in another: they are in folders named train, validation and test, or a checksum of their
names deals them out (split_names.py), or, in the sample library, they are written from a seed with the split's name.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from argparse import ArgumentParser
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from dist_mem.data.build_record import bind_splits, note_texts
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets.builder import WORK_DIR, OtherBuildError, build_into, check_tokenizer, is_built, place_tokenizer
from dist_mem.datasets.corpus import by_name, find_files
from dist_mem.datasets.corpus_rows import TEXT_SUFFIX
from dist_mem.datasets.options import add_tokenizer_from, positive, seed
from dist_mem.datasets.sample_library import write_book
from dist_mem.datasets.source import RecallSpan, SourceDocument, encode_text, read_text, recall_distances
from dist_mem.datasets.split_names import SPLITS, split_of
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import sha256_of
from dist_mem.runtime.progress import show_count


class Question(NamedTuple):
    """The whole text of a document."""

    text: str  # ends with a space and the answer
    answer: str
    referent: int  # first character of what the answer is to be remembered from
    title: str


Compose = Callable[[Sequence[str]], Question]  # from sentences of the haystack, as many as there are


def add_text_options(parser: ArgumentParser) -> None:
    """Add the options of a task in text."""
    add = parser.add_argument
    add("--books", type=Path, metavar="DIR", help="fill documents with these .txt files, as PG-19's, in their splits")
    add_tokenizer_from(parser, "(default: bytes)")


def tokenizer_of(folder: Path | None) -> Tokenizer:
    """Return the tokenizer of --tokenizer-from."""
    return BytesTokenizer() if folder is None else find_tokenizer(folder)


def fit_question(compose: Compose, haystack: Iterator[str], tokenizer: Tokenizer, length: int) -> Question | None:
    """Return the question among as many sentences as fit into `length` tokens; None if it does not fit alone."""
    room = length - len(tokenizer.encode(compose([]).text))
    if room < 0:
        return None
    sentences: list[str] = []
    for sentence in haystack:
        room -= _num_tokens(tokenizer, sentence)
        if room < 0:
            break
        sentences.append(sentence)
    while True:  # a sentence may have more tokens in the text than alone
        question = compose(sentences)
        excess = len(tokenizer.encode(question.text)) - length
        if excess <= 0:
            return question
        while excess > 0 and sentences:
            excess -= _num_tokens(tokenizer, sentences.pop())


@lru_cache(maxsize=4096)
def _num_tokens(tokenizer: Tokenizer, sentence: str) -> int:
    return len(tokenizer.encode(f" {sentence}"))


def document_of(question: Question, number: int, tokenizer: Tokenizer) -> TokenizedDocument:
    """Return a question as a document: the tokens of its answer are scored, and refer to one place.

    Raises:
        ValueError: the tokenizer cannot represent the answer.
    """
    text, stop = question.text, len(question.text)
    span = RecallSpan(stop - len(question.answer), stop, question.referent)
    source = SourceDocument(f"{number:06d}", question.title, text, recall=[span])
    tokens, starts = tokenizer.encode_with_offsets(text)
    recall = recall_distances(source, text, starts)
    scored: np.ndarray = recall > 0  # not the space before the answer, if that is a token of its own
    if tokenizer.decode(tokens[scored]).strip() != question.answer:
        decoded = tokenizer.decode(tokens[scored])
        raise ValueError(f"the tokenizer makes {decoded!r} of the answer {question.answer!r}: take another one")
    return TokenizedDocument(
        id=source.id,
        title=source.title,
        year=None,
        words=len(text.split()),
        bytes=len(encode_text(text)),
        tokens=tokens,
        mask=scored,
        recall=recall,
    )


def document_of_words(
    tokens: np.ndarray,
    number: int,
    title: str,
    tokenizer: WordTokenizer,
    *,
    mask: np.ndarray,
    recall: np.ndarray | None = None,
) -> TokenizedDocument:
    """Return a document of a task whose tokens are words; arrays as those of TokenizedDocument, of any integer type."""
    tokens = tokens.astype(tokenizer.dtype)
    num_bytes = int(tokenizer.piece_bytes[tokens].sum())
    return TokenizedDocument(f"{number:06d}", title, None, len(tokens), num_bytes, tokens, mask, recall)


# Mohtashami and Jaggi 2023 (Landmark attention), and RULER (Hsieh et al. 2024)
REPEATED = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
LIBRARY_BOOK = 500  # tokens, about: one chapter
BLOCK = 64  # sentences of a book, cut at once: the places of all blocks of PG-19 take some 20 MB
# Published: NLTK's Punkt. Here after . ! or ?, with quotation marks, and at empty lines: no model to download
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)]*\s+|\n\s*\n\s*")


class Haystack:
    """What documents are filled with."""

    name: str  # for the recipe: two haystacks of one name have the same sentences, if they have the same texts

    def texts(self, split: str) -> str | None:
        """Return a checksum of the files that a split reads; None if it reads none."""
        return None

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        """Yield the sentences of a document without end, each on one line."""
        raise NotImplementedError


class Repeat(Haystack):
    """The same lines again and again."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.name = f"repeat {len(lines)}"

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        return cycle(self.lines)


class Books(Haystack):
    """The .txt files of a folder; a document reads on from a sentence of one, and then in others."""

    def __init__(self, folder: Path, splits: tuple[str, ...]) -> None:
        """Raises UnusableError if a split has no file."""
        files = find_files([folder], (TEXT_SUFFIX,))
        folders = by_name(files, fix="name none of them so") or {}
        if not folders:
            for name, path in files.items():
                folders.setdefault(split_of(name, FRACTIONS), {})[name] = path
        missing = [split for split in splits if not folders.get(split)]
        if missing:
            raise UnusableError(
                f"--books {folder} has no .txt file for {missing[0]}: give it more books, or folders named "
                f"{', '.join(splits)}"
            )
        self.paths = {split: list(folders[split].values()) for split in splits}
        content = repr(sorted((name, path.stat().st_size) for name, path in files.items()))
        self.name = f"books {hashlib.sha256(content.encode()).hexdigest()[:16]}"

    @cache  # noqa: B019  # a command makes one
    def texts(self, split: str) -> str | None:
        found = hashlib.sha256()
        for path in show_count(self.paths[split], f"{split}: comparing", total=len(self.paths[split]), unit="books"):
            found.update(bytes.fromhex(sha256_of(path)))
        return found.hexdigest()

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        """Pass over books without a sentence, as PG-19 has one. Raises UnusableError if no book has any."""
        start, paths = draw.random(), self.paths[split]
        while True:
            path = draw.choice(paths)
            num_sentences, ends = _blocks_of(path)
            if not num_sentences:
                if not any(_blocks_of(other)[0] for other in paths):
                    raise UnusableError(f"{path} has no text, nor has another book of {split}: give --books with text")
                continue
            place = int(start * num_sentences)
            for block in range(place // BLOCK, len(ends) - 1):
                yield from _sentences_of(path, block)[place % BLOCK :]
                place = 0
            start = 0.0


class Library(Haystack):
    """The sample library, with new books in every document, which begins anywhere in its first one.

    A chapter begins and ends with sentences that it has nowhere else: from its begin, short documents would not have
    them all, and what a model learned from those would fail in longer ones.
    """

    name = "sample library from any sentence"

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        seed, start = draw.getrandbits(64), draw.random()
        for number in count():
            book = write_book(random.Random(f"haystack {split} {seed} {number}"), num_tokens=LIBRARY_BOOK)
            found = [sentence for sentence in cut_sentences(book.text) if sentence.endswith(".")]  # no headings
            yield from found[int(start * len(found)) :]
            start = 0.0


def cut_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with single spaces for its white space."""
    return [sentence for _, sentence in _cut(text)]


def _cut(text: str) -> Iterator[tuple[int, str]]:
    starts = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    for start, stop in pairwise(starts):
        if sentence := " ".join(text[start:stop].split()):
            yield start, sentence


@cache
def _blocks_of(path: Path) -> tuple[int, array[int]]:
    """Return the number of sentences of a book, and the characters where its blocks begin and the last one ends."""
    text = _text_of(path)
    starts = [start for start, _ in _cut(text)]
    return len(starts), array("L", [*starts[::BLOCK], len(text)])


@lru_cache(maxsize=2**12)
def _sentences_of(path: Path, block: int) -> list[str]:
    _, ends = _blocks_of(path)
    return cut_sentences(_text_of(path)[ends[block] : ends[block + 1]])


@lru_cache(maxsize=32)
def _text_of(path: Path) -> str:
    return read_text(path)


FRACTIONS = {"train": 0.8, "validation": 0.1, "test": 0.1}  # of all examples that a task can draw
DrawnT = TypeVar("DrawnT")


class Task(NamedTuple):
    """What a data directory contains; `documents` yields any number of documents of a split."""

    name: str
    recipe: str  # everything that the documents of a split depend on, but split and count
    tokenizer: Tokenizer
    documents: Callable[[str], Iterator[TokenizedDocument]]
    what: str = "documents"  # in messages
    texts: Callable[[str], str | None] = lambda split: None  # checksum of the books that a split reads, if it does


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
    add("--seed", type=seed, default=0, help="of all documents (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out, when this one is whole")


def build_tasks(tasks: Iterable[tuple[Task, Path]], options: argparse.Namespace) -> None:
    """Write the tokenizer and all splits of each task's data directory, and keep those that exist already.

    Where --overwrite replaces several directories and the command is stopped, the same command keeps those that were
    replaced.

    Raises:
        ValueError: a directory holds another build.
    """
    counts = {split: getattr(options, split) for split in SPLITS}
    replaced: list[Path] = []
    for task, out in tasks:
        mark = out / WORK_DIR / "replaced"
        is_replaced = options.overwrite and mark.exists()
        try:
            _build_task(task, out, counts, overwrite=options.overwrite and not is_replaced)
        except OtherBuildError:
            if not is_replaced:
                raise
            _build_task(task, out, counts, overwrite=True)  # the stopped command had other options
        if options.overwrite:
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
            replaced.append(mark)
    for mark in replaced:
        mark.unlink(missing_ok=True)
        with suppress(OSError):  # another command builds there
            mark.parent.rmdir()


def _build_task(task: Task, out: Path, counts: dict[str, int], *, overwrite: bool) -> None:
    def build(place: Path) -> None:
        check_tokenizer(task.tokenizer, place)
        recipes = {split: task.recipe.format(count=number) for split, number in counts.items()}
        missing = [split for split in counts if not _is_kept(task, place / split, recipes[split])]
        place_tokenizer(task.tokenizer, place)
        for split in missing:
            _build_split(task, place / split, recipes[split], counts[split])
        bind_splits(place, counts)

    build_into(out, build, overwrite=overwrite)


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


def _is_kept(task: Task, split_dir: Path, recipe: str) -> bool:
    return is_built(split_dir, recipe, lambda: task.texts(split_dir.name), _name_place(split_dir))


def _build_split(task: Task, split_dir: Path, recipe: str, count: int) -> None:
    split, where = split_dir.name, _name_place(split_dir)
    texts = task.texts(split)  # takes minutes: after the index, a kill meanwhile would leave the split without it
    documents = show_count(islice(task.documents(split), count), where, total=count, unit="documents")
    fingerprint = task.tokenizer.fingerprint
    write_split(documents, split_dir, name=task.name, split=split, tokenizer_fingerprint=fingerprint, recipe=recipe)
    note_texts(split_dir, texts)
    print(f"{where}: {count} {task.what}", flush=True)


def _name_place(split_dir: Path) -> str:
    return f"{split_dir.parent.name} {split_dir.name}"

"""A user's own corpus as documents of splits: which files, which split each document is in, and no text in two splits.

Data flow: find_files -> by_name, else split_names.py -> read_documents -> without_shared_texts -> build_dataset.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.data.tar import MAX_ID_LEN, check_id
from dist_mem.datasets.corpus_rows import (
    ROW_SUFFIXES,
    SUFFIXES,
    TEXT_SUFFIX,
    CorpusRow,
    RowFile,
    check_library,
    digest_of,
    read_rows,
)
from dist_mem.datasets.source import SourceDocument
from dist_mem.datasets.split_names import (
    SPLITS,
    first_occurrences,
    split_named,
    splits_in_path,
    without_split_folders,
    words_digest,
)
from dist_mem.datasets.tree import check_name, describe_passed_over, print_passed_over, printable_name, suffix_of, walk
from dist_mem.errors import UnusableError
from dist_mem.runtime.progress import show_count

Files = dict[str, Path]  # by name: the path under the source with slashes


class CorpusDocuments(NamedTuple):
    """The documents of a split, and what they are compared by."""

    documents: list[SourceDocument]
    digests: bytearray  # 16 bytes per document: `words_digest`


def find_files(sources: Sequence[Path], suffixes: Sequence[str] = SUFFIXES) -> Files:
    """Return the files of the sources in the order of their names. One printed line counts what was passed over.

    Of several sources, folders above a source that are named as a split are part of the names of its files, but for
    those above all sources.

    Raises:
        UnusableError: a source is no corpus, there are no files, two have one name, or a library is missing; or as
            `walk`.
    """
    corpus: Files = {}
    walked = []
    for source, prefix in zip(sources, _folders_of_splits(sources), strict=True):
        if source.is_dir():
            found = walk(source, suffixes)
            files = {f"{prefix}{name}": path for name, path in found.files.items()}
            walked.append(found)
        elif source.is_file() and suffix_of(source.name, suffixes):
            check_name(source, source.name)
            files = {f"{prefix}{source.name}": source}
        else:
            raise UnusableError(
                f"--source {printable_name(source)} is neither a folder nor a file of {', '.join(suffixes)}"
            )
        twice = sorted(set(files) & set(corpus))
        if twice:
            raise UnusableError(f"{corpus[twice[0]]} and {files[twice[0]]} have one name, {twice[0]}: rename one")
        corpus.update(files)
    listed = " ".join(map(printable_name, sources))
    if not corpus:
        over = describe_passed_over(*walked)
        raise UnusableError(
            f"--source {listed}: no file of {', '.join(suffixes)} there{f'; passed over {over}' if over else ''}"
        )
    print_passed_over(listed, *walked)
    for path in corpus.values():
        check_library(path)
    return dict(sorted(corpus.items()))


def _folders_of_splits(sources: Sequence[Path]) -> list[str]:
    """Return for each source what comes before the names of its files: folders named as a split, with slashes."""
    # A link to a folder keeps its own name, which `resolve` would not.
    folders = [os.path.normpath((each if each.is_dir() else each.parent).absolute()) for each in sources]
    above = os.path.commonpath(folders)
    parts = [Path(folder).relative_to(above).parts for folder in folders]
    return ["".join(f"{part}/" for part in found if split_named(part) is not None) for found in parts]


def by_name(corpus: Files, *, fix: str) -> dict[str, Files] | None:
    """Return the files of each split that their names say, without the folders of splits; None if none says one.

    Args:
        fix: what else the user can do about files of which only some are in splits.

    Raises:
        UnusableError: some files are in splits, and others not; a path names two splits; or two get one name.
    """
    splits: dict[str, Files] = {}
    outside: list[Path] = []
    for name, path in corpus.items():
        suffix = suffix_of(name, SUFFIXES) or ""
        found = splits_in_path(name[: len(name) - len(suffix)].split("/"), is_rows=suffix in ROW_SUFFIXES)
        rest = without_split_folders(name)
        if len(found) > 1:
            raise UnusableError(f"{path} is named as of {' and of '.join(found)}: rename it, or {fix}")
        if not found:
            outside.append(path)
            continue
        other = splits.setdefault(found[0], {}).setdefault(rest, path)
        if other != path:
            raise UnusableError(f"{other} and {path} have one name in {found[0]}, {rest}: rename one")
    if splits and outside:
        split, named = next(iter(splits.items()))
        raise UnusableError(
            f"{outside[0]} is in none of the folders {', '.join(SPLITS)}, and {next(iter(named.values()))} is named as "
            f"of {split}: put it there, or {fix}"
        )
    names = [*SPLITS, *sorted(splits.keys() - set(SPLITS))]
    return {split: splits[split] for split in names if split in splits} or None


def read_documents(
    groups: Mapping[str, Files], deal: Callable[[str], str], *, text_field: str, id_field: str | None
) -> dict[str, CorpusDocuments]:
    """Read each text once, and return the documents of each split.

    Args:
        groups: split -> its files; "": files whose documents are dealt out.
        deal: returns the split of a document by its title, which is its id before `plain_id`.
        text_field, id_field: of a row, as in `RowFile`.

    Raises:
        UnusableError: a file or a row is damaged; an id cannot be used, or comes twice in a split.
    """
    splits: dict[str, CorpusDocuments] = {}
    seen: dict[str, set[str]] = {}

    def read() -> Iterator[tuple[str, str, CorpusRow, bytes]]:
        for group, files in groups.items():
            for name, path in files.items():
                file = RowFile(path, text_field, id_field, path.stat().st_mtime_ns)
                yield from ((group, *each) for each in _read_file(name, file))

    for group, title, row, digest in show_count(read(), "reading", unit="documents"):
        split = group or deal(title)
        documents, digests = splits.setdefault(split, CorpusDocuments([], bytearray()))
        document = SourceDocument(plain_id(title), title, row)
        try:
            check_id(document.id, seen.setdefault(split, set()), split)
        except ValueError as error:
            places = [place_of(other) for other in documents if other.id == document.id]
            raise UnusableError(f"{' and '.join([*places, place_of(document)])}: {error}") from error
        documents.append(document)
        digests += digest
    return splits


def _read_file(name: str, file: RowFile) -> Iterator[tuple[str, CorpusRow, bytes]]:
    for number, load in read_rows(file):
        content = load()
        title = content.id or (f"{name}:{number}" if suffix_of(name, ROW_SUFFIXES) else text_title(name))
        row = CorpusRow(file, number, len(content.text.encode()), digest_of(content.text))
        yield title, row, words_digest(content.text)


def text_title(name: str) -> str:
    """Return the title of a text file, which is its name without the suffix."""
    return name[: -len(TEXT_SUFFIX)]


def plain_id(title: str) -> str:
    """Return an id that a tar can carry: the title itself, or its plain characters and a checksum."""
    plain = re.sub(r"[^0-9A-Za-z_-]+", "_", title)
    if plain != title or len(plain) > MAX_ID_LEN:  # maybe no longer unique: a checksum makes it so
        plain = f"{plain[: MAX_ID_LEN - 17]}-{hashlib.sha256(title.encode()).hexdigest()[:16]}"
    return plain


def place_of(document: SourceDocument) -> str:
    """Return the file and row of a document from `read_documents`."""
    row = document.source
    return row.file.place(row.number) if isinstance(row, CorpusRow) else document.id


def without_shared_texts(splits: Mapping[str, CorpusDocuments], *, drop: bool) -> dict[str, list[SourceDocument]]:
    """Return the documents of each split, and print how many texts come twice.

    Args:
        drop: leave out documents whose text is in an earlier split too.

    Raises:
        UnusableError: two splits have a text in common, and `drop` is false; or nothing is left of a split.
    """
    order = list(splits)
    firsts = first_occurrences([splits[split].digests for split in order])
    kept: dict[str, list[SourceDocument]] = {}
    for number, (split, first) in enumerate(zip(order, firsts, strict=True)):
        documents = splits[split].documents
        shared = first[:, 0] != number
        num_shared, num_repeats = int(shared.sum()), int((first[:, 1] != np.arange(len(first)))[~shared].sum())
        if num_shared and not drop:
            here = int(shared.argmax())
            earlier = order[int(first[here, 0])]
            other = splits[earlier].documents[int(first[here, 1])]
            raise UnusableError(
                f"{num_shared:,} of {len(documents):,} texts of {split} are in an earlier split too: "
                f"{documents[here].title!r} in {split} ({place_of(documents[here])}) is {other.title!r} in {earlier} "
                f"({place_of(other)}): remove one of them, or give --drop-duplicates, which keeps the earlier split's"
            )
        if num_repeats:
            print(f"{split}: {num_repeats:,} of {len(documents):,} documents repeat a text of the same split, kept")
        if num_shared:
            print(f"{split}: {num_shared:,} of {len(documents):,} documents dropped: an earlier split has their text")
        kept[split] = [document for document, other in zip(documents, shared.tolist(), strict=True) if not other]
        if not kept[split]:
            raise UnusableError(f"nothing is left of {split}: earlier splits have all of its texts")
    return kept

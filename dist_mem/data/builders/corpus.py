"""A user's own corpus as documents of splits: which files, which split each document is in, and no text in two splits.

Data flow: find_files -> by_folder, else hash_split.py -> read_documents -> without_shared_texts -> build_dataset.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist_mem.data.builders.duplicates import first_occurrences, words_digest
from dist_mem.data.builders.hash_split import SPLITS
from dist_mem.data.builders.rows import ROW_SUFFIXES, SUFFIXES, Row, RowFile, check_library, digest_of, read_rows
from dist_mem.data.builders.source import SourceDocument
from dist_mem.data.tar import check_id
from dist_mem.errors import UnusableError
from dist_mem.runtime.file_schema import check, plain_name, record, rows, text

MAX_ID_LEN = 80  # characters, of a name in a tar
HF_STATE, HF_DICT = "state.json", "dataset_dict.json"  # of folders that Hugging Face's datasets saves
_DATA_FILES = rows(record({"filename": plain_name}, is_open=True))
_OF_DATASETS = record({}, {"_data_files": _DATA_FILES, "splits": rows(text)}, is_open=True)
Files = dict[str, Path]


class Documents(NamedTuple):
    """The documents of a split, and what they are compared by."""

    documents: list[SourceDocument]
    digests: bytearray  # 16 bytes a document: `words_digest`


def find_files(sources: Sequence[Path]) -> Files:
    """Return the files by name, which is their path under the source with slashes, in the order of the names.

    Raises:
        UnusableError: a source is no corpus, there are no files, two have one name, or a library is missing.
    """
    found: Files = {}
    for source in sources:
        if source.is_dir():
            paths = {path.relative_to(source).as_posix(): path for path in _files_in(source)}
        elif source.is_file() and source.name.endswith(SUFFIXES):
            paths = {source.name: source}
        else:
            raise UnusableError(f"--source {source} is neither a folder nor a file of {', '.join(SUFFIXES)}")
        shared = sorted(set(paths) & set(found))
        if shared:
            raise UnusableError(f"{found[shared[0]]} and {paths[shared[0]]} have one name, {shared[0]}: rename one")
        found.update(paths)
    if not found:
        raise UnusableError(f"--source {' '.join(map(str, sources))}: no file of {', '.join(SUFFIXES)} there")
    for path in found.values():
        check_library(path)
    return dict(sorted(found.items()))


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.name == HF_STATE:
            yield from _saved_dataset(path)
        elif path.suffix == ".arrow" and (path.parent / HF_STATE).exists():
            continue  # named by that file, or left by the `map` of a dataset that was loaded from this folder
        elif path.name.endswith(SUFFIXES) and path.is_file():
            yield path


def _saved_dataset(state: Path) -> list[Path]:
    content = _json_object(state)
    if content.get("_indices_data_files"):
        raise UnusableError(
            f"{state.parent} is a selection of rows, as old versions of datasets saved it: load it and save it again"
        )
    paths = [state.parent / entry["filename"] for entry in content.get("_data_files", [])]
    for path in paths:
        if not path.is_file():
            raise UnusableError(f"{path} is missing, which {state} names: copy the whole folder again")
    return paths


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path} is damaged ({error}): copy it again") from error
    check(content, _OF_DATASETS, path, UnusableError, ": copy the whole folder again")
    return dict(content)


def by_folder(files: Files, sources: Sequence[Path]) -> dict[str, Files] | None:
    """Return the files of each split, named by their path under its folder; None if no file is in such a folder.

    A split is a folder train, validation or test, a file of rows named train.jsonl or train-00000.parquet, or a split
    of a saved DatasetDict, whatever its name.

    Raises:
        UnusableError: some files are in splits, and others not.
    """
    saved = [source / HF_DICT for source in sources if (source / HF_DICT).is_file()]
    names = dict.fromkeys([*SPLITS, *(split for path in saved for split in _json_object(path).get("splits", []))])
    splits: dict[str, Files] = {split: {} for split in names}
    outside: list[Path] = []
    for name, path in files.items():
        folder, _, rest = name.partition("/")
        if not rest and name.endswith(ROW_SUFFIXES):
            folder, rest = re.split("[.-]", name, maxsplit=1)[0], name
        if rest and folder in splits:
            splits[folder][rest] = path
        else:
            outside.append(path)
    if len(outside) == len(files):
        return None
    if outside:
        raise UnusableError(
            f"{outside[0]} is in none of the folders {', '.join(names)}, and other files are: put it there, or give "
            "--split-by-hash, which deals out all documents"
        )
    return {split: named for split, named in splits.items() if named}


def read_documents(
    groups: Mapping[str, Files], deal: Callable[[str], str], *, text_field: str, id_field: str | None
) -> dict[str, Documents]:
    """Read each text once, and return the documents of each split.

    Args:
        groups: split -> its files; "": files whose documents are dealt out.
        deal: returns the split of a document by its title, which is its id before `plain_id`.
        text_field, id_field: of a row, as in `RowFile`.

    Raises:
        UnusableError: a file or a row is damaged; an id cannot be used, or comes twice in a split.
    """
    from tqdm import tqdm

    splits: dict[str, Documents] = {}
    seen: dict[str, set[str]] = {}
    bar = tqdm(desc="reading", unit="doc", leave=False, disable=None)
    for group, files in groups.items():
        for name, path in files.items():
            for title, row, digest in _read_file(name, RowFile(path, text_field, id_field, path.stat().st_mtime_ns)):
                split = group or deal(title)
                documents, digests = splits.setdefault(split, Documents([], bytearray()))
                document = SourceDocument(plain_id(title), title, row)
                try:
                    check_id(document.id, seen.setdefault(split, set()), split)
                except ValueError as error:
                    places = [place_of(other) for other in documents if other.id == document.id]
                    raise UnusableError(f"{' and '.join([*places, place_of(document)])}: {error}") from error
                documents.append(document)
                digests += digest
                bar.update()
    bar.close()
    return splits


def _read_file(name: str, file: RowFile) -> Iterator[tuple[str, Row, bytes]]:
    for number, load in read_rows(file):
        content = load()
        title = content.id or (f"{name}:{number}" if name.endswith(ROW_SUFFIXES) else name.removesuffix(".txt"))
        row = Row(file, number, len(content.text.encode()), digest_of(content.text))
        yield title, row, words_digest(content.text)


def plain_id(title: str) -> str:
    """Return an id that a tar can carry: the title itself, or its plain characters and a checksum."""
    plain = re.sub(r"[^0-9A-Za-z_-]+", "_", title)
    if plain != title or len(plain) > MAX_ID_LEN:  # maybe no longer unique: a checksum makes it so
        plain = f"{plain[: MAX_ID_LEN - 9]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    return plain


def place_of(document: SourceDocument) -> str:
    """Return the file and row of a document from `read_documents`."""
    row = document.source
    return row.file.place(row.number) if isinstance(row, Row) else document.id


def without_shared_texts(splits: Mapping[str, Documents], *, drop: bool) -> dict[str, list[SourceDocument]]:
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

"""Verify a data directory: find missing, truncated and altered files, and name the affected documents.

`dist-mem data verify DIR` prints the problems found here. Every byte is read: each tar is compared with the checksum
in its index; those of a URL are fetched into the cache first. If a tar differs, each document's arrays are compared
with their own checksum, and everything around them (tar headers, the .json, padding) is regenerated and compared. If
it does not, every document is decoded: a checksum shows that the bytes are unchanged, not that they are text.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.config import DataConfig
from dist_mem.data.build_record import BUILD_NAME, built_splits, check_one_build, check_record
from dist_mem.data.directory import check_split, index_alone, local_dir, open_tokenizer, refresh
from dist_mem.data.index import DOCUMENTS_NAME, INDEX_NAME, DocumentEntry, ShardEntry
from dist_mem.data.metadata import ShardError
from dist_mem.data.remote.fetch import RefusedError, RemoteError, UnreachableError, check_address, is_remote, show
from dist_mem.data.shard import Index, check_document, read_mask, read_recall, read_tokens
from dist_mem.data.tar import BLOCK_BYTES, TokenizedDocument, sample_files, tar_bytes
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import JSON_NAME
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import WrongFileError, open_regular, sha256_of
from dist_mem.runtime.names import is_hidden
from dist_mem.runtime.terminal import count_noun

USUAL_SPLITS = ("train", "validation", "test")
REMEDY = "build (--overwrite) or copy the tar again"
REBUILD = "build (--overwrite) the data again"


class ShardProblem(NamedTuple):
    where: str  # the file or folder, relative to the data directory; "" if the message names it
    document: str | None  # id of the (first) affected document; None: the whole file, or no document
    message: str


def verify_dataset(path: Path | str, *, cache: str | None = None, splits: Sequence[str] = ()) -> list[ShardProblem]:
    """Return all problems of a data directory: of its tokenizer, and of every folder that has an index or tars.

    Args:
        path: as data.path.  cache: as data.cache.
        splits: the splits to verify; none: all, or for a URL, which cannot be listed, the existing USUAL_SPLITS.

    Raises:
        UnusableError: there is no such directory, or no such split in it.
    """
    data = DataConfig(path=str(path), cache=cache)
    if is_remote(data.path):
        check_address(data.path, "the data")
    else:
        if not local_dir(data).is_dir():
            raise UnusableError(f"{path}: there is no such data directory")
        for split in splits:
            check_split(data, split)
    problems = []
    tokenizer = None
    try:
        refresh(data, [])
        tokenizer = open_tokenizer(data)
    except (RemoteError, ValueError) as error:
        problems.append(ShardProblem(JSON_NAME, None, str(error)))
    found, unreached = list(splits), list[ShardProblem]()
    if is_remote(data.path):
        found, unreached = _remote_splits(data, splits)
    elif not splits:
        found = _local_splits(local_dir(data))
    problems += unreached
    if not found and not unreached and not (is_remote(data.path) and problems):
        if not (local_dir(data) / JSON_NAME).exists():
            raise UnusableError(
                f"{path}: it is no data directory: it has neither {JSON_NAME} nor {INDEX_NAME} of a split"
            )
        problems.append(ShardProblem("", None, f"no split: {show(data.path)} has no folder with an {INDEX_NAME}"))
    for split in found:
        problems.extend(verify_split(data, split, tokenizer))
    with noting(problems, ""):
        check_one_build(local_dir(data), found if is_remote(data.path) else built_splits(local_dir(data)))
    return problems


def unbound_splits(data: DataConfig) -> list[str]:
    """Return the splits that no file binds to the others: they were built before there was one."""
    directory = local_dir(data)
    return [split for split in built_splits(directory) if not (directory / split / BUILD_NAME).exists()]


@contextmanager
def noting(problems: list[ShardProblem], where: str) -> Iterator[None]:
    """Add a ShardError of the block to the problems."""
    try:
        yield
    except ShardError as error:
        problems.append(ShardProblem(where, None, str(error)))


def existing_splits(data: DataConfig) -> list[str]:
    """Return the splits of a data directory; of a URL, which cannot be listed, the existing USUAL_SPLITS.

    Raises:
        RemoteError: the server does not say that a split is absent, but its index cannot be fetched.
    """
    if not is_remote(data.path):
        return _local_splits(local_dir(data))
    found = []
    for split in USUAL_SPLITS:
        try:
            refresh(data, [split])
        except RefusedError:
            continue
        except UnreachableError as error:
            raise UnreachableError(f"{error}; name the splits that are known, as --split train") from error
        found.append(split)
    return found


def _local_splits(data_dir: Path) -> list[str]:
    paths = [path for pattern in (f"*/{INDEX_NAME}", "*/*.tar") for path in data_dir.glob(pattern)]
    return sorted({path.parent.name for path in paths if not is_hidden(path.parent.name) and not is_hidden(path.name)})


def _remote_splits(data: DataConfig, asked: Sequence[str]) -> tuple[list[str], list[ShardProblem]]:
    """Return the splits whose index could be fetched, and the problems of the others."""
    found, problems = [], []
    for split in asked or USUAL_SPLITS:
        try:
            refresh(data, [split])
            found.append(split)
        except RemoteError as error:
            if asked or not isinstance(error, RefusedError):
                problems.append(ShardProblem(f"{split}/{INDEX_NAME}", None, str(error)))
    return found, problems


def verify_split(data: DataConfig, split: str, tokenizer: Tokenizer | None) -> list[ShardProblem]:
    """Return all problems of one split; `tokenizer` None: do not compare tokenizers or decode the text."""
    split_dir = local_dir(data) / split
    problems: list[ShardProblem] = []
    index = None
    with noting(problems, f"{split}/{INDEX_NAME}"):
        index = index_alone(data, split)
    if index is None:
        return problems
    with noting(problems, f"{split}/{BUILD_NAME}"):
        check_record(split_dir, index.fingerprint)
    if tokenizer is not None and tokenizer.fingerprint != index.tokenizer_fingerprint:
        message = (
            f"tokenized with another tokenizer (fingerprint {index.tokenizer_fingerprint[:12]}) than the one beside it "
            f"({tokenizer.fingerprint[:12]}): bring back {JSON_NAME} and its model, or build again (--overwrite)"
        )
        problems.append(ShardProblem(f"{split_dir.name}/{INDEX_NAME}", None, message))
        tokenizer = None
    for document_id, times in Counter(entry.id for entry in index.documents).items():
        if times > 1:
            problems.append(
                ShardProblem(f"{split_dir.name}/{DOCUMENTS_NAME}", document_id, f"comes {times} times: {REBUILD}")
            )
    for shard in index.shards:
        problems.extend(_verify_shard(index, shard, tokenizer))
    found = [] if is_remote(data.path) else split_dir.glob("*.tar")  # a cache may hold others
    tars = {path.name for path in found if not is_hidden(path.name)}
    for stray in sorted(tars - {shard.name for shard in index.shards}):
        problems.append(
            ShardProblem(f"{split_dir.name}/{stray}", None, f"not in {INDEX_NAME}: it belongs to another build")
        )
    return problems


def _verify_shard(index: Index, shard: ShardEntry, tokenizer: Tokenizer | None) -> Iterator[ShardProblem]:
    path = index.split_dir / shard.name
    where = f"{index.split_dir.name}/{shard.name}"
    numbers = index.documents.in_shard(shard)
    try:
        index.source.fetch(shard)
    except RemoteError as error:
        yield ShardProblem(where, None, str(error))
        return
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        first = index.documents[numbers[0]].id if numbers else None
        lost = f", with {count_noun(len(numbers), 'document')} from {first} on" if numbers else ""
        yield ShardProblem(where, first, f"missing{lost}: {REMEDY}")
        return
    except WrongFileError as error:
        yield ShardProblem(where, None, str(error.strerror))
        return
    if size < shard.bytes:
        yield _describe_cut(where, size, shard, [index.documents[number] for number in numbers])
    elif size > shard.bytes:
        yield ShardProblem(
            where, None, f"{count_noun(size - shard.bytes, 'byte')} longer than it was written: {REMEDY}"
        )
    elif sha256_of(path) != shard.sha256:
        yield from _find_altered(index, path, where, numbers)
    else:
        for number in numbers:
            if message := _find_fault(index, number, tokenizer):
                yield ShardProblem(where, index.documents[number].id, message)


def _find_fault(index: Index, number: int, tokenizer: Tokenizer | None) -> str | None:
    """Return why a document of an unaltered tar is not the text that its index describes; None if it is."""
    entry = index.documents[number]
    try:
        check_document(index, number)
    except ShardError:
        return f"its tokens (or mask, or recall) are not those of {INDEX_NAME}, although the tar is: {REBUILD}"
    if tokenizer is None:
        return None
    tokens = read_tokens(index, number)
    if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
        return f"token {int(tokens.max())} is not among the {tokenizer.vocab_size} of its tokenizer: {REBUILD}"
    if not tokenizer.keeps_text:
        return None
    text = b"".join(tokenizer.pieces[token] for token in tokens.tolist())
    try:
        _without_cut_characters(text).decode()
    except UnicodeDecodeError as error:
        return f"its text is no UTF-8, at byte {error.start:,}: {REBUILD}"
    words = len(text.decode(errors="surrogateescape").split())
    if (len(text), words) != (entry.bytes, entry.words):
        found = f"{len(text):,} bytes in {words:,} words"
        stated = f"{entry.bytes:,} in {entry.words:,}"
        return f"its text has {found}, but {INDEX_NAME} says {stated}: {REBUILD}"
    return None


def _without_cut_characters(text: bytes) -> bytes:
    """Return the text without incomplete characters at its ends: a split of enwik8 begins and ends at any byte."""
    first = next((place for place, byte in enumerate(text[:3]) if byte & 0xC0 != 0x80), 0)
    for cut in range(min(4, len(text) - first)):
        end = len(text) - cut
        if cut == 0 or text[end] >= 0xC0:  # the removed bytes begin a character
            with suppress(UnicodeDecodeError):
                text[first:end].decode()
                return text[first:end]
    return text[first:]


def _describe_cut(where: str, size: int, shard: ShardEntry, entries: list[DocumentEntry]) -> ShardProblem:
    lost = [entry for entry in entries if _end(entry) > size]
    message = f"cut at byte {size:,} of {shard.bytes:,}: {REMEDY}"
    if not lost:
        return ShardProblem(where, None, f"{message}; no document is hit, only the end mark is")
    return ShardProblem(
        where, lost[0].id, f"{message}; {count_noun(len(lost), 'document')} from {lost[0].id} on cut or missing"
    )


def _find_altered(index: Index, path: Path, where: str, numbers: list[int]) -> Iterator[ShardProblem]:
    with open_regular(path) as file:
        content = np.memmap(file, dtype=np.uint8, mode="r")
    start, found = 0, 0
    for number in numbers:
        entry = index.documents[number]
        end = -(-_end(entry) // BLOCK_BYTES) * BLOCK_BYTES
        message = _document_damage(index, number, content[start:end], start)
        if message:
            found += 1
            yield ShardProblem(where, entry.id, f"{message}: {REMEDY}")
        start = end
    if content[start:].any():
        found += 1
        yield ShardProblem(where, None, f"bytes after the last document are altered: {REMEDY}")
    if not found:
        message = "differs from its checksum, but a second reading finds it whole: check the disk and its cables"
        yield ShardProblem(where, None, message)


def _document_damage(index: Index, number: int, actual: np.ndarray, start: int) -> str | None:
    """Return how a document's bytes in its tar, from byte `start`, are altered; None if they are not."""
    try:
        check_document(index, number)
    except ShardError:
        return "its tokens (or mask, or recall) are altered: their checksum does not match"
    entry = index.documents[number]
    arrays = (read_tokens(index, number), read_mask(index, number), read_recall(index, number))
    document = TokenizedDocument(entry.id, entry.title, entry.year, entry.words, entry.bytes, *arrays)
    written = np.frombuffer(tar_bytes(sample_files(document, entry.sha256)), dtype=np.uint8)
    if len(written) == len(actual) and (written == actual).all():
        return None
    common = min(len(written), len(actual))
    differs = np.flatnonzero(written[:common] != actual[:common])
    return f"byte {start + int(differs[0] if len(differs) else common):,}, around its tokens, is altered"


def _end(entry: DocumentEntry) -> int:
    """Return the first byte after a document's arrays; its tokens come last."""
    return entry.tokens_offset + entry.num_tokens * np.dtype(entry.dtype).itemsize

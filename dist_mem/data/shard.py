"""The shard format: a webdataset tar of tokenized documents, and an index with the place of every token.

Data flow: datasets/builder.py -> write_split -> tars + index (index.py) -> read_index, read_tokens -> the lanes.

    <split>/<name>-<split>-00000.tar     <id>.json and <id>.tokens.npy of each document, where they exist <id>.mask.npy
                                         (which tokens are scored) and <id>.recall.npy (what tokens refer back to)
    <split>/documents.safetensors        places, counts, titles and checksums of the documents
    <split>/index.json                   totals and tars, with their checksums; written last

Tars are written by webdataset's writer, so that a plain `wds.WebDataset` reads them. Here they are never unpacked: a
tar stores its files uncompressed, so tokens are memory-mapped in place, at the offsets of the index. shards/README.md
describes the format for other readers.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dist_mem.data.build_record import BUILD_NAME
from dist_mem.data.index import (
    DOCUMENTS_NAME,
    FORMAT_VERSION,
    INDEX_NAME,
    ColumnParts,
    DocumentEntry,
    DocumentTable,
    ShardEntry,
    map_documents,
    read_index_json,
    write_index,
)
from dist_mem.data.metadata import ShardError, reading
from dist_mem.data.tar import (
    MASK_DTYPE,
    RECALL_DTYPE,
    TokenizedDocument,
    WrittenTar,
    arrays_sha256,
    check_id,
    document_arrays,
    document_metadata,
    sample_files,
    write_tar,
)
from dist_mem.runtime.files import open_regular
from dist_mem.runtime.names import check_plain

MAX_YEAR = 10**6  # BC and AD
MAX_SHARD_BYTES = 64 * 2**20  # of arrays; a tar exceeds it by its last document and by headers
MAX_MAPS = 128  # tars of a split that are kept mapped: each is an open file
MAX_SHARD_DOCUMENTS = 100_000  # headers and padding take 2 kB each, so that of short documents these are most of a tar


class ShardSource:
    """Source of a split's tars, which puts them beside the index; the base class expects them there already."""

    def fetch(self, shard: ShardEntry) -> None:
        """Return when the tar is there. Raises OSError if it cannot be fetched."""

    def expect(self, shard: ShardEntry) -> None:
        """Announce that the tar will be needed soon."""

    def close(self) -> None:
        """Cancel all fetches; a `fetch` running in another thread raises OSError."""


@dataclass(frozen=True)
class Index:
    """One split: the content of its index, and the memory maps of the tars that were read last."""

    split_dir: Path
    format_version: int
    name: str  # of the dataset
    split: str
    tokenizer_fingerprint: str
    recipe: str  # fingerprint of the builder's inputs; "" if made without a builder
    official_words: int | None  # published word count of this split, if it is complete
    num_tokens: int
    counted_words: int
    num_bytes: int  # of the text
    shards: list[ShardEntry]
    documents: DocumentTable
    fingerprint: str  # sha256 of everything above but split_dir
    source: ShardSource = field(default_factory=ShardSource, repr=False, compare=False)
    maps: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_words(self) -> int:
        """Number of words of the split, for its word-level perplexity: the official count if there is one."""
        return self.counted_words if self.official_words is None else self.official_words


def write_split(
    documents: Iterable[TokenizedDocument],
    split_dir: Path | str,
    *,
    name: str,
    split: str,
    tokenizer_fingerprint: str,
    recipe: str = "",
    official_words: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Index:
    """Write the tars of a split, in the order given, and then its index. The same documents always give the same bytes.

    Raises:
        ValueError: a name or an id is unusable, an id comes twice, or an array does not fit its document.
    """
    check_names(name, split)
    split_dir = Path(split_dir)
    split_dir.mkdir(parents=True, exist_ok=True)
    for old in (INDEX_NAME, DOCUMENTS_NAME, BUILD_NAME):
        (split_dir / old).unlink(missing_ok=True)  # an old index must never describe new tars
    shards: list[ShardEntry] = []
    parts = ColumnParts()
    for number, group in enumerate(_shard_groups(_check_documents(documents, split), max_shard_bytes)):
        shard, entries = _write_shard(group, split_dir / f"{name}-{split}-{number:05d}.tar")
        shards.append(shard)
        parts.add(entries, number)
    tars = split_dir.glob(f"{glob.escape(f'{name}-{split}')}-*.tar")
    for stale in set(tars) - {split_dir / shard.name for shard in shards}:
        stale.unlink()  # of an earlier, longer build of the same split
    columns = parts.join_columns()
    head = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "split": split,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "recipe": recipe,
        "official_words": official_words,
        "num_documents": len(columns["num_tokens"]),
        "num_tokens": int(columns["num_tokens"].sum()),
        "counted_words": int(columns["words"].sum()),
        "num_bytes": int(columns["bytes"].sum()),
        "shards": [asdict(shard) for shard in shards],
    }
    write_index(split_dir, head, columns)
    return read_index(split_dir)


def check_names(name: str, split: str) -> None:
    """Raise UnusableError if the name of a dataset or a split cannot be in the name of a tar."""
    check_plain(name, "name")
    check_plain(split, "split")
    check_plain(f"{name}-{split}-00000.tar", "the name of a tar, of name and split,")


def read_index(split_dir: Path | str) -> Index:
    """Read and check the index of a split, and map its columns.

    Raises:
        ShardError: one of its two files is missing or damaged, or they do not belong together.
    """
    split_dir = Path(split_dir)
    path = split_dir / INDEX_NAME
    head = read_index_json(path)
    documents = map_documents(split_dir / DOCUMENTS_NAME, head, path)
    shards = [ShardEntry(**shard) for shard in head["shards"]]
    rest = {key: value for key, value in head.items() if key not in ("num_documents", "documents", "shards")}
    return Index(split_dir=split_dir, shards=shards, documents=documents, **rest)


def fetch_shards(index: Index) -> None:
    """Fetch every tar of a remote split. Raises OSError if one cannot be fetched."""
    for shard in index.shards:
        index.source.fetch(shard)


def cancel_fetches(indexes: Iterable[Index]) -> None:
    """Cancel all fetches of splits, also in other threads: they raise OSError."""
    for index in indexes:
        index.source.close()


def expect_document(index: Index, document: int) -> None:
    """Announce that a document will be read soon: its tar may have to be fetched."""
    index.source.expect(index.documents.shard_of(document))


def read_tokens(index: Index, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Return tokens [start, stop) of a document, (n,) uint16 or uint32, a read-only view of the memory-mapped tar."""
    entry = index.documents[document]
    return _array(index, document, entry, entry.tokens_offset, np.dtype(entry.dtype))[start:stop]


def read_mask(index: Index, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
    """Return which of tokens [start, stop) are scored, (n,) bool; None: all of them."""
    entry = index.documents[document]
    offset = entry.mask_offset
    return None if offset is None else _array(index, document, entry, offset, MASK_DTYPE)[start:stop]


def read_recall(index: Index, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
    """Return the distance of tokens [start, stop) to their referents, (n,) int32, 0 = none; None: not recorded."""
    entry = index.documents[document]
    offset = entry.recall_offset
    return None if offset is None else _array(index, document, entry, offset, RECALL_DTYPE)[start:stop]


def check_document(index: Index, document: int) -> None:
    """Raise a ShardError that names document and shard, unless the checksum of the document's arrays matches."""
    entry = index.documents[document]
    arrays = (read_tokens(index, document), read_mask(index, document), read_recall(index, document))
    if arrays_sha256(*arrays) != entry.sha256:
        raise ShardError(
            f"document {entry.id} in {index.split_dir / entry.shard} is damaged: its checksum does not match"
        )


def _write_shard(documents: Iterable[TokenizedDocument], path: Path) -> tuple[ShardEntry, list[DocumentEntry]]:
    written: list[tuple[TokenizedDocument, str]] = []

    def samples() -> Iterator[dict[str, Any]]:
        for document in documents:
            sha256 = arrays_sha256(*document_arrays(document).values())
            written.append((document, sha256))
            yield sample_files(document, sha256)

    tar = write_tar(samples(), path)
    entries = [_entry(document, path.name, sha256, tar) for document, sha256 in written]
    return ShardEntry(path.name, tar.num_bytes, tar.sha256), entries


def _entry(document: TokenizedDocument, shard: str, sha256: str, tar: WrittenTar) -> DocumentEntry:
    offsets: dict[str, int | None] = {"tokens_offset": None, "mask_offset": None, "recall_offset": None}
    for kind, array in document_arrays(document).items():
        offset, size = tar.members[f"{document.id}.{kind}.npy"]
        offsets[f"{kind}_offset"] = offset + size - array.nbytes  # an .npy file ends with its elements
    metadata: dict[str, Any] = {**document_metadata(document), **offsets}
    dtype = document.tokens.dtype.str
    return DocumentEntry(num_tokens=len(document.tokens), shard=shard, dtype=dtype, sha256=sha256, **metadata)


def _check_documents(documents: Iterable[TokenizedDocument], split: str) -> Iterator[TokenizedDocument]:
    seen: set[str] = set()
    for document in documents:
        check_id(document.id, seen, split)
        if document.year is not None and abs(document.year) > MAX_YEAR:
            raise ValueError(
                f"document {document.id}: year is {document.year}, but must be from {-MAX_YEAR} to {MAX_YEAR}: "
                "correct it"
            )
        yield document


def _shard_groups(
    documents: Iterable[TokenizedDocument], max_shard_bytes: int
) -> Iterator[Iterator[TokenizedDocument]]:
    """Yield consecutive documents shard by shard; a shard ends with the document that reaches a limit."""
    queue = iter(documents)
    for first in queue:

        def group(document: TokenizedDocument | None = first) -> Iterator[TokenizedDocument]:
            size = number = 0
            while document is not None:
                yield document
                size += sum(array.nbytes for array in document_arrays(document).values())
                number += 1
                document = next(queue, None) if size < max_shard_bytes and number < MAX_SHARD_DOCUMENTS else None

        yield group()


def _array(index: Index, document: int, entry: DocumentEntry, offset: int, dtype: np.dtype[Any]) -> np.ndarray:
    shard = index.maps.pop(entry.shard, None)
    if shard is None:
        shard = _map_shard(index, index.documents.shard_of(document), entry.id)
        for oldest in [*index.maps][: 1 - MAX_MAPS]:  # a map is closed once no array of it is used
            index.maps.pop(oldest, None)
    index.maps[entry.shard] = shard  # after the others: the first is that of the longest ago
    return np.frombuffer(shard, dtype=dtype, count=entry.num_tokens, offset=offset)


def _map_shard(index: Index, shard: ShardEntry, document_id: str) -> np.ndarray:
    index.source.fetch(shard)
    path = index.split_dir / shard.name
    remedy = f"; document {document_id} lies in it: build (--overwrite) or copy it again"
    with reading(path, remedy), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.bytes:
            raise ShardError(f"{path} has {size} bytes, not the {shard.bytes} of the index{remedy}")
        return np.memmap(file, dtype=np.uint8, mode="r")

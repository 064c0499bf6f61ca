"""The columns of a large index as a file: in the safetensors format, written once, then mapped by all ranks of a node.

It belongs to one content of index.json, whose SHA-256 it has, and has a SHA-256 of its own. Any program that reads
safetensors can read it; the library's own reader copies instead of mapping.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dist_mem.data.document_table import COLUMNS, Columns, ShardEntry, column_shape
from dist_mem.data.index_json import IndexContent
from dist_mem.data.index_schema import check_head
from dist_mem.data.metadata import ShardError
from dist_mem.runtime.files import replacing

LAYOUT = "1"  # of columns and header; a file of another layout is written again
BLOCK_BYTES = 2**22  # of one read
_TYPES = {"<i8": "I64", "<i4": "I32", "|u1": "U8"}  # in the header; wide types first, so that every column is aligned
_MAX_HEADER = 10**8  # bytes, as in the library
_NO_DIGEST = "0" * 64


class WrongFileError(Exception):
    """The file cannot be used: it is damaged, of another layout, or belongs to another content of index.json."""


class OtherIndexError(WrongFileError):
    """The file is that of another content of index.json."""


class MappedIndex(NamedTuple):
    """The content of an index, whose documents are in memory or mapped."""

    head: dict[str, Any]  # all keys but shards and documents
    shards: list[ShardEntry]
    columns: Columns  # as in COLUMNS, read-only


def in_memory(content: IndexContent) -> MappedIndex:
    """Return the content of an index with its columns in memory."""
    return MappedIndex(content.head, content.shards, content.documents.whole())


def write_index_file(path: Path, content: IndexContent) -> None:
    """Replace `path` with a file of this content, atomically. Raises OSError."""
    header = _header(content)
    digest = hashlib.sha256(header)
    with replacing(path) as file:
        file.write(header)
        for name in _ORDER:
            for part in content.documents.of(name):
                block = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                file.write(block)
                digest.update(block)
        file.seek(header.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())


def map_index_file(path: Path, index_path: Path, index_sha256: str) -> MappedIndex:
    """Check a file of columns and map it.

    Args:
        index_path: the index.json.
        index_sha256: the SHA-256 of its bytes.

    Raises:
        WrongFileError: it is damaged, of another layout, or of another index.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        header = file.read(8)
        size = int.from_bytes(header, "little")
        if len(header) < 8 or size > _MAX_HEADER:
            raise WrongFileError("its header is damaged")
        header += file.read(size)
        try:
            described = json.loads(header[8:])
            metadata = described.pop("__metadata__")
            layout, of_index, sha256 = (metadata[key] for key in ("layout", "index_sha256", "sha256"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise WrongFileError("its header is damaged") from error
        if layout != LAYOUT:
            raise WrongFileError(f"it has layout {layout}, not {LAYOUT}")
        if of_index != index_sha256:
            raise OtherIndexError("it belongs to another index.json")
        if _digest(header.replace(str(sha256).encode(), _NO_DIGEST.encode(), 1), file) != sha256:
            raise WrongFileError("it does not match its checksum")
        content = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)[len(header) :]
    try:
        head, shards = json.loads(metadata["head"]), json.loads(metadata["shards"])
        check_head({**head, "shards": shards, "documents": []}, index_path)
        columns = _columns(described, content)
    except (ValueError, LookupError, TypeError, ShardError) as error:
        raise WrongFileError(f"its content is not that of an index ({error})") from error
    return MappedIndex(head, [ShardEntry(**shard) for shard in shards], columns)


_ORDER = [name for dtype in _TYPES for name, (of_name, _) in COLUMNS.items() if of_name == dtype]


def _header(content: IndexContent) -> bytes:
    described: dict[str, Any] = {
        "__metadata__": {
            "layout": LAYOUT,
            "index_sha256": content.sha256,
            "sha256": _NO_DIGEST,  # until the file is whole, and whenever it is computed
            "head": json.dumps(content.head),
            "shards": json.dumps([vars(shard) for shard in content.shards]),
        }
    }
    end = 0
    for name in _ORDER:
        dtype, shape = COLUMNS[name][0], content.documents.shape(name)
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        described[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _columns(described: dict[str, Any], content: np.ndarray) -> dict[str, np.ndarray]:
    num_documents = described["num_tokens"]["shape"][0]
    columns = {}
    for name, (dtype, _) in COLUMNS.items():
        begin, end = described[name]["data_offsets"]
        shape = column_shape(name, num_documents, end - begin)
        columns[name] = content[begin:end].view(dtype).reshape(shape)
    return columns


def _digest(header: bytes, file: IO[bytes]) -> str:
    digest = hashlib.sha256(header)
    for block in _blocks(file):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block

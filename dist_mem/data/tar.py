"""Write tokenized documents into tars, the same bytes every time; the only module that uses webdataset's writer."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import replacing, sha256_of

BLOCK_BYTES = 512  # headers and payloads of a tar start at multiples of it
TOKEN_DTYPES = (np.uint16, np.uint32)
MASK_DTYPE = np.dtype(bool)
RECALL_DTYPE = np.dtype("<i4")
MAX_TOKENS = np.iinfo(RECALL_DTYPE).max  # of a document
MAX_ID_LEN = 80  # characters; the header of a tar member has room for 100
ID_PATTERN = re.compile(rf"[^\x00-\x1f\x7f-\U0010ffff./\\]{{1,{MAX_ID_LEN}}}")


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as a builder passes it to `write_split`."""

    id: str  # unique in its split; printable ASCII without ".", "/" and "\\"
    title: str
    year: int | None
    words: int  # len(text.split())
    bytes: int  # of the text as UTF-8 with LF
    tokens: np.ndarray  # (num_tokens,) uint16 or uint32, without BOS
    mask: np.ndarray | None = None  # (num_tokens,) bool, tokens that are scored; None: all
    recall: np.ndarray | None = None  # (num_tokens,) int32, distance in tokens to what a token refers to, 0 = none


class WrittenTar(NamedTuple):
    """Size, checksum and members of a tar."""

    num_bytes: int
    sha256: str  # of the whole file
    members: dict[str, tuple[int, int]]  # name -> (byte offset of its payload in the tar, payload bytes)


def check_id(document_id: str, seen: set[str], split: str) -> None:
    """Raise ValueError for an id that cannot be a name in a tar, or is in `seen`; otherwise add it there."""
    # webdataset cuts names at the first dot
    if not ID_PATTERN.fullmatch(document_id):
        raise ValueError(
            f"document id {document_id!r} in split {split!r} cannot be a name in a tar: rename it to at most "
            f"{MAX_ID_LEN} printable ASCII characters without '.', '/' and '\\'"
        )
    if document_id in seen:
        raise ValueError(f"document id {document_id!r} comes twice in split {split!r}: ids must be unique")
    seen.add(document_id)


def sample_files(document: TokenizedDocument, sha256: str) -> dict[str, Any]:
    """Return a document as a sample for webdataset's writer: `__key__`, and file suffix -> bytes."""
    metadata = {**document_metadata(document), "tokens": len(document.tokens), "sha256": sha256}
    files: dict[str, Any] = {"__key__": document.id, "json": (json_text(metadata) + "\n").encode()}
    for kind, array in document_arrays(document).items():
        stream = io.BytesIO()
        np.lib.format.write_array(stream, array, allow_pickle=False)
        files[f"{kind}.npy"] = stream.getvalue()
    return files


def document_metadata(document: TokenizedDocument) -> dict[str, Any]:
    """Return the metadata of a document that are both in the index and in its .json."""
    return {key: getattr(document, key) for key in ("id", "title", "year", "words", "bytes")}


def document_arrays(document: TokenizedDocument) -> dict[str, np.ndarray]:
    """Return the arrays of a document as stored, in the order in which they are hashed."""
    if document.tokens.dtype not in TOKEN_DTYPES:
        raise ValueError(f"document {document.id}: tokens are {document.tokens.dtype}; they must be uint16 or uint32")
    if len(document.tokens) > MAX_TOKENS:
        raise ValueError(
            f"document {document.id}: {len(document.tokens):,} tokens; at most {MAX_TOKENS:,} fit, because distances "
            "between them are int32: split it"
        )
    arrays = {"tokens": document.tokens.astype(document.tokens.dtype.newbyteorder("<"), copy=False)}
    for kind, array, dtype in (("mask", document.mask, MASK_DTYPE), ("recall", document.recall, RECALL_DTYPE)):
        if array is None:
            continue
        if array.shape != document.tokens.shape:
            raise ValueError(f"document {document.id}: {kind} has shape {array.shape}, tokens {document.tokens.shape}")
        arrays[kind] = array.astype(dtype, copy=False)
    return arrays


def arrays_sha256(*arrays: np.ndarray | None) -> str:
    """Return the sha256 of the bytes of all arrays that are not None, concatenated."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def write_tar(samples: Iterable[Mapping[str, Any]], path: Path) -> WrittenTar:
    """Write samples (`__key__` and file suffix -> bytes) as one tar, atomically; return the place of every payload."""
    with replacing(path) as stream:
        with _open_writer(stream) as tar:
            for sample in samples:
                tar.write(dict(sample))
        stream.flush()
        written = Path(stream.name)
        # Read the offsets back from the tar, as a reader will: they do not depend on how the writer made its headers.
        with tarfile.open(written, "r:") as tar:
            members = {member.name: (member.offset_data, member.size) for member in tar}
        return WrittenTar(written.stat().st_size, sha256_of(written), members)


def tar_bytes(sample: Mapping[str, Any]) -> bytes:
    """Return the bytes of one sample in a tar: headers, payloads, padding; without the end of the archive."""
    stream = io.BytesIO()
    with _open_writer(stream) as tar:
        tar.write(dict(sample))
        end = tar.tarstream.offset
    return stream.getvalue()[:end]


def _open_writer(stream: IO[bytes]) -> Any:
    """Open webdataset's writer with fixed metadata, so that every build gives the same bytes."""
    # Imported here because webdataset imports torch, which costs one second: reading an index does not need it.
    from webdataset.writer import TarWriter

    return TarWriter(stream, user="dist_mem", group="dist_mem", mode=0o444, mtime=0, encoder=False, compress=False)

"""Schema of index.json: code after `read_index` never meets a key, a type or an offset that it cannot use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dist_mem.data.metadata import REMEDY, ShardError
from dist_mem.data.tar import ID_PATTERN, MASK_DTYPE, MAX_TOKENS, RECALL_DTYPE
from dist_mem.runtime.file_schema import check, integer, leaf, one_of, optional, plain_name, record, rows, sha256, text
from dist_mem.runtime.names import PLAIN, is_plain

_COUNT = integer(high=2**53)
_TAR = leaf(f"{PLAIN}, and end in .tar", lambda name: is_plain(name) and name.endswith(".tar"))
_ID = leaf("the id of a document", lambda value: isinstance(value, str) and bool(ID_PATTERN.fullmatch(value)))
_SHARD = record({"name": _TAR, "bytes": _COUNT, "sha256": sha256}, is_open=False)
_DOCUMENT = record(
    {
        "id": _ID,
        "title": text,
        "year": optional(integer(-(10**6), 10**6)),
        "words": _COUNT,
        "bytes": _COUNT,
        "num_tokens": integer(high=int(MAX_TOKENS)),
        "shard": _TAR,
        "dtype": one_of("<u2", "<u4"),
        "tokens_offset": _COUNT,
        "mask_offset": optional(_COUNT),
        "recall_offset": optional(_COUNT),
        "sha256": sha256,
    },
    is_open=False,
)
_INDEX = record(
    {
        "format_version": integer(1),
        "name": plain_name,
        "split": plain_name,
        "tokenizer_fingerprint": text,
        "recipe": text,
        "official_words": optional(integer(1)),
        "num_tokens": _COUNT,
        "counted_words": _COUNT,
        "num_bytes": _COUNT,
        "shards": rows(_SHARD),
        "documents": rows(_DOCUMENT),
        "fingerprint": sha256,
    },
    is_open=False,
)
_SUMS = {"num_tokens": "num_tokens", "counted_words": "words", "num_bytes": "bytes"}  # of the split, of its documents


def check_index(body: Any, path: Path) -> None:
    """Raise a ShardError that names the first invalid key of an index.json."""
    check(body, _INDEX, path, ShardError, REMEDY)
    check(body, _fits_together, path, ShardError, REMEDY)


def _fits_together(key: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield inconsistencies between valid values: wrong sums, repeated names, arrays outside their tar."""
    sizes = {shard["name"]: shard["bytes"] for shard in body["shards"]}
    if len(sizes) < len(body["shards"]):
        yield "shards has a name twice"
    documents = body["documents"]
    if len({entry["id"] for entry in documents}) < len(documents):
        yield "documents has an id twice"
    for total, part in _SUMS.items():
        if body[total] != (found := sum(entry[part] for entry in documents)):
            yield f"{total} is {body[total]}, but its documents have {found}"
    widths = {"mask": MASK_DTYPE.itemsize, "recall": RECALL_DTYPE.itemsize}
    for entry in documents:
        if entry["shard"] not in sizes:
            yield f"document {entry['id']} lies in {entry['shard']!r}, which is not among its shards"
            continue
        for kind, width in {"tokens": np.dtype(entry["dtype"]).itemsize, **widths}.items():
            offset = entry[f"{kind}_offset"]
            if offset is not None and offset + entry["num_tokens"] * width > sizes[entry["shard"]]:
                yield f"{kind} of document {entry['id']} end behind the end of {entry['shard']}"

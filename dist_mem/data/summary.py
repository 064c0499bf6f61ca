"""What a data directory contains: sizes of its splits, and passages of its documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dist_mem.config import DataConfig
from dist_mem.data.directory import local_dir, open_index, open_tokenizer, refresh
from dist_mem.data.remote.fetch import show
from dist_mem.data.shard import Index, check_document, read_tokens
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.verify import existing_splits
from dist_mem.errors import UnusableError
from dist_mem.runtime.terminal import span, table


def summarize(path: str, *, cache: str | None = None, splits: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a table of the splits.

    Args:
        path: as data.path.  cache: as data.cache.
        splits: those to show; none: all.

    Raises:
        UnusableError: there is no such data directory or split, or it is damaged.
    """
    data = DataConfig(path=path, cache=cache)
    tokenizer = _open(data, [])
    names = list(splits) or existing_splits(data)
    if not names:
        raise UnusableError(f"{show(path)}: no split has an index: build the dataset, or give another folder")
    indexes = {name: _open_split(data, name) for name in names}
    first = next(iter(indexes.values()))
    yield f"{first.name}: tokenizer {tokenizer.kind}, {tokenizer.vocab_size:,} entries"
    rows: list[Sequence[str]] = [("split", "documents", "tokens", "words", "text", "longest", "tars")]
    for name, index in indexes.items():
        longest = int(index.documents.num_tokens.max(initial=0))
        sizes = [f"{number:,}" for number in (len(index.documents), index.num_tokens, index.num_words)]
        rows.append((name, *sizes, _megabytes(index.num_bytes), f"{longest:,}", str(len(index.shards))))
    yield from table(rows)


def passages(
    path: str, split: str, *, num_documents: int, num_tokens: int, seed: int, cache: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield passages of random documents: what they are of, and their text as the tokenizer decodes it.

    Args:
        path, cache: as `summarize`.
        num_documents: different documents, all if there are fewer.  num_tokens: of each passage, at a random place.

    Raises:
        UnusableError: as `summarize`, or a document is damaged.
    """
    data = DataConfig(path=path, cache=cache)
    tokenizer = _open(data, [split])
    index = _open_split(data, split)
    draw = np.random.default_rng(seed)
    filled = np.flatnonzero(np.asarray(index.documents.num_tokens))
    for number in draw.permutation(filled)[:num_documents]:
        entry = index.documents[int(number)]
        begin = int(draw.integers(max(1, entry.num_tokens - num_tokens + 1)))
        end = min(begin + num_tokens, entry.num_tokens)
        check_document(index, int(number))
        text = tokenizer.decode(read_tokens(index, int(number), begin, end))
        yield f"{entry.id}, {entry.title}: tokens {span(begin, end)} of {entry.num_tokens:,}", text


def _open(data: DataConfig, splits: Sequence[str]) -> Tokenizer:
    """Fetch what is needed of a remote directory, and return the tokenizer."""
    refresh(data, splits)
    directory = local_dir(data)
    if not directory.is_dir():
        raise UnusableError(f"{show(data.path)}: there is no such data directory")
    try:
        return open_tokenizer(data)
    except ValueError as error:
        raise UnusableError(str(error)) from error


def _open_split(data: DataConfig, split: str) -> Index:
    refresh(data, [split])
    return open_index(data, split)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

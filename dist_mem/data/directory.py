"""Open `data.path`: a directory, or a URL whose files are cached on this node. No other module distinguishes the two.

    start of a command   refresh: fetch tokenizer.json, tokenizer.model and the indexes again, once on each node
    a document is read   RemoteShards.fetch: fetch its tar if the cache does not have it; then memory-map it

A tar in the cache is used only if it has the size and the sha256 of index.json; each process checks once.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from dist_mem.config import DataConfig
from dist_mem.config.check import nearest
from dist_mem.data.build_record import BUILD_NAME, built_splits, check_one_build, check_record
from dist_mem.data.index import DOCUMENTS_NAME, INDEX_NAME, ShardEntry, map_documents, read_index_json
from dist_mem.data.metadata import ShardError, read_metadata
from dist_mem.data.remote.fetch import (
    METADATA_BYTES,
    FailedRemoteError,
    RefusedError,
    RemoteError,
    UnreachableError,
    Verify,
    WrongRemoteError,
    address,
    download,
    hold_lock,
    identity,
    is_remote,
    show,
    writing,
)
from dist_mem.data.remote.stage import stage, stage_on_all_ranks
from dist_mem.data.shard import Index, ShardSource, read_index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import JSON_NAME, KINDS, load_tokenizer, read_described, read_tokenizer_metadata
from dist_mem.runtime.environment import user_cache_dir
from dist_mem.runtime.files import fsync_path, sha256_of

log = logging.getLogger(__name__)
START_NAME = ".start"  # lock of `refresh`; contains the last start it ran for, and kind and text of its error
NEW_NAME = ".new"  # folder of the files that `refresh` fetches, until it has all
_RECORDED: dict[str, type[RemoteError]] = {"wrong": WrongRemoteError, "failed": FailedRemoteError}


def local_dir(data: DataConfig) -> Path:
    """Return the directory to read from: `data.path` itself, or its place in the cache."""
    if not is_remote(data.path):
        return Path(data.path)
    shown = show(data.path)
    readable = re.sub(r"[^A-Za-z0-9]+", "-", shown.partition(":")[2]).strip("-")[-60:]
    return _cache(data) / f"{readable}-{hashlib.sha256(identity(data.path).encode()).hexdigest()[:12]}"


def open_tokenizer(data: DataConfig) -> Tokenizer:
    """Load the tokenizer of `data.path`; if remote, after `refresh`. Raises ValueError as `load_tokenizer` does."""
    return load_tokenizer(local_dir(data))


def open_index(data: DataConfig, split: str) -> Index:
    """Open a split of `data.path`, or of this node's copy; if remote, after `refresh`.

    Raises:
        ShardError: as `read_index`; or the splits of the directory are of different builds.
    """
    index, directory = index_alone(data, split), local_dir(data)
    check_record(directory / split, index.fingerprint)
    if not is_remote(data.path):  # else `refresh` has compared them
        check_one_build(directory, built_splits(directory))
    return index


def index_alone(data: DataConfig, split: str) -> Index:
    """Open a split as `open_index`, whatever the other splits are."""
    if not is_remote(data.path):
        check_split(data, split)
    index = read_index(local_dir(data) / split)
    if index.split != split:  # results are named after it
        path = index.split_dir / INDEX_NAME
        raise ShardError(f"{path} is of split {index.split!r}, but its folder is {split!r}: rename the folder")
    if is_remote(data.path):
        index = replace(index, source=RemoteShards(data.path, index.split_dir))
    return stage(index, data)


def check_split(data: DataConfig, split: str) -> None:
    """Raise ShardError if a directory on disk has other splits, but not this one; the message lists them."""
    directory = local_dir(data)
    splits = built_splits(directory)
    if splits and not (directory / split).is_dir():
        meant = nearest(split, splits)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ShardError(f"{directory} has no split {split!r}: it has {', '.join(splits)}{hint}")


def refresh(
    data: DataConfig, splits: Iterable[str], *, start: str | None = None, cancelled: threading.Event | None = None
) -> None:
    """Fetch tokenizer and indexes of a remote `data.path` again; of all calls with the same `start`, one fetches.

    If the server cannot be reached and the cache has all files from before, use these with a warning.

    Raises:
        RemoteError: they cannot be fetched; other calls of this start raise it too, without a request to the server.
            Or `cancelled` was set.
    """
    if not is_remote(data.path):
        return
    start, cancelled = start or uuid.uuid4().hex, cancelled or threading.Event()
    with hold_lock(local_dir(data) / START_NAME, cancelled) as record:
        record.seek(0)
        last_start, kind, message = [*record.read().decode().split("\n", 2), "", ""][:3]
        error: RemoteError | None = _RECORDED[kind](message) if last_start == start and kind else None
        if last_start != start:
            error = _refresh(data, list(splits), cancelled)
            kind = "" if error is None else "wrong" if isinstance(error, WrongRemoteError) else "failed"
            with writing(local_dir(data)):
                record.truncate(0)
                record.write(f"{start}\n{kind}\n{error or ''}".encode())
    if error is not None:
        raise error


def refresh_on_all_ranks(data: DataConfig, splits: Sequence[str]) -> None:
    """Run `refresh`, and copy shards as `data.stage` requires, once on each node; every rank calls it.

    Raises:
        UnusableError: on every rank, if it failed on any, or if the nodes now have different files.
    """
    if is_remote(data.path):
        _refresh_on_all_ranks(data, splits)
    if data.stage != "none":
        from dist_mem.runtime.distributed import on_all_ranks  # it imports torch

        shown = show(data.path)
        indexes = on_all_ranks(lambda: [open_index(data, split) for split in splits], f"opening {shown}")
        stage_on_all_ranks(indexes, f"copying {shown} to the nodes")


def _refresh_on_all_ranks(data: DataConfig, splits: Sequence[str]) -> None:
    from dist_mem.runtime.distributed import from_rank0, gather_objects  # they import torch
    from dist_mem.runtime.rounds import work_in_rounds

    start, cancelled = from_rank0(uuid.uuid4().hex), threading.Event()

    def fetch() -> list[str]:
        refresh(data, splits, start=start, cancelled=cancelled)
        return [sha256_of(local_dir(data) / name) for name in _names(splits)]

    held = work_in_rounds(fetch, f"fetching {show(data.path)}", cancel=cancelled.set)
    if any(other != held for other in gather_objects(held)):
        raise FailedRemoteError(
            f"{show(data.path)}: the nodes of this job hold different versions of {', '.join(_names(splits))}; start "
            "again when the server has one for all"
        )


def _cache(data: DataConfig) -> Path:
    if data.cache is not None:
        return Path(data.cache).expanduser()

    return user_cache_dir() / "dist_mem"


def _names(splits: Iterable[str]) -> list[str]:
    return [JSON_NAME, *(f"{split}/{name}" for split in splits for name in (INDEX_NAME, DOCUMENTS_NAME))]


def _refresh(data: DataConfig, splits: Sequence[str], cancelled: threading.Event) -> RemoteError | None:
    """Fetch the files, all or none; return the error, if any."""
    directory = local_dir(data)
    new = directory / NEW_NAME
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        _download_metadata(data, new, splits, cancelled)
        with writing(directory):
            _replace_metadata(directory, new, splits)
    except UnreachableError as error:
        if not all((directory / name).exists() for name in _names(splits)):
            return error
        date = datetime.fromtimestamp((directory / JSON_NAME).stat().st_mtime, UTC).date()
        log.warning("%s; continuing with the tokenizer and the indexes fetched on %s, in %s", error, date, directory)
    except RemoteError as error:
        return error
    except ShardError as error:  # of two builds
        return WrongRemoteError(str(error).replace(str(new), show(data.path)))
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return None


def _replace_metadata(directory: Path, new: Path, splits: Sequence[str]) -> None:
    for split in splits:
        (directory / split / BUILD_NAME).unlink(missing_ok=True)
    for path in sorted(path for path in new.rglob("*") if path.is_file()):
        place = directory / path.relative_to(new)
        place.parent.mkdir(exist_ok=True)
        path.replace(place)
        fsync_path(place.parent)


def _download_metadata(data: DataConfig, directory: Path, splits: Sequence[str], cancelled: threading.Event) -> None:
    """Fetch what has changed into `directory`, a new folder in that of the data."""
    download(
        address(data.path, JSON_NAME),
        directory / JSON_NAME,
        limit=METADATA_BYTES,
        verify=read_metadata,
        cancelled=cancelled,
    )
    metadata = read_tokenizer_metadata(directory)
    name = KINDS[metadata["kind"]].file_name
    if name is not None:

        def is_same(path: Path) -> None:  # never where the fingerprint is not of all that the file has
            _check_sha256(path, metadata["fingerprint"], JSON_NAME)

        def verify(path: Path) -> None:
            read_described(path, metadata)

        if not _is_good(directory.parent / name, is_same):
            download(
                address(data.path, name), directory / name, limit=METADATA_BYTES, verify=verify, cancelled=cancelled
            )
    for split in splits:
        _download_index(data, directory, split, cancelled)
    check_one_build(directory, splits)


def _download_index(data: DataConfig, directory: Path, split: str, cancelled: threading.Event) -> None:
    """Fetch index.json, build.json, and documents.safetensors unless the cache has the one of that index."""
    source, path = address(data.path, f"{split}/{INDEX_NAME}"), directory / split / INDEX_NAME
    download(source, path, limit=METADATA_BYTES, verify=read_index_json, cancelled=cancelled)
    head = read_index_json(path)

    def verify(path: Path) -> None:
        map_documents(path, head, directory / split / INDEX_NAME)

    source, path = address(data.path, f"{split}/{DOCUMENTS_NAME}"), directory / split / DOCUMENTS_NAME
    if not _is_good(directory.parent / split / DOCUMENTS_NAME, verify):
        download(source, path, limit=head["documents"]["bytes"], verify=verify, cancelled=cancelled)
    source, path = address(data.path, f"{split}/{BUILD_NAME}"), directory / split / BUILD_NAME
    with suppress(RefusedError):  # built before there was such a file
        download(source, path, limit=METADATA_BYTES, verify=read_metadata, cancelled=cancelled)


def _is_good(path: Path, verify: Verify) -> bool:
    with suppress(ValueError, FileNotFoundError):
        verify(path)
        return True
    return False


def _check_sha256(path: Path, expected: str, stated_in: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ValueError(f"{path} has sha256 {found[:12]}, but {stated_in} says {expected[:12]}")


def _check_shard(path: Path, shard: ShardEntry) -> None:
    """Raise ValueError, or FileNotFoundError, unless the tar has the size and sha256 of the index."""
    size = path.stat().st_size
    if size != shard.bytes:
        raise ValueError(f"{path} has {size:,} bytes, but {INDEX_NAME} says {shard.bytes:,}")
    _check_sha256(path, shard.sha256, INDEX_NAME)


class RemoteShards(ShardSource):
    """The tars of a remote split; the first process of the node that needs one fetches it into the cache."""

    def __init__(self, url: str, split_dir: Path) -> None:
        self._url = url
        self._split_dir = split_dir
        self._closed = threading.Event()
        self._good: set[str] = set()  # in the cache, and checked by this process
        self._failed: dict[str, RemoteError] = {}  # failed fetches; the next call raises the same error at once
        self._expected: set[str] = set()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="shards")

    def fetch(self, shard: ShardEntry) -> None:
        """Return when the tar is in the cache and matches the index. Raises RemoteError."""
        if shard.name in self._failed:
            raise self._failed[shard.name]
        try:
            self._fetch(shard)
        except RemoteError as error:
            self._failed[shard.name] = error
            raise

    def expect(self, shard: ShardEntry) -> None:
        """Fetch the tar in the background, one at a time; an error is raised only by the `fetch` that needs the tar."""
        if shard.name not in self._expected:
            self._expected.add(shard.name)
            self._ahead.submit(self._fetch, shard)

    def close(self) -> None:
        """Cancel all fetches, also in other threads: their `fetch` raises RemoteError."""
        self._closed.set()
        self._ahead.shutdown(cancel_futures=True)

    def _fetch(self, shard: ShardEntry) -> None:
        path = self._split_dir / shard.name
        if shard.name in self._good:
            return

        def verify(path: Path) -> None:
            _check_shard(path, shard)

        if not _is_good(path, verify):
            with hold_lock(path.with_name(f".{shard.name}.lock"), self._closed):
                if not _is_good(path, verify):  # another process may have fetched it while we waited
                    source = address(self._url, f"{self._split_dir.name}/{shard.name}")
                    download(source, path, limit=shard.bytes, verify=verify, cancelled=self._closed)
        self._good.add(shard.name)

"""Copy shards to each node's local disk or memory before the first step: `data.stage`.

    data.path, or the cache of a remote one -> one process of the node -> STAGE_DIR/dist_mem-UID/NAME-SPLIT-FINGERPRINT

Such a folder is a data directory of one split. Its name has the fingerprint of its content, so the next job of the same
user finds it. `whole.json` is written last; until then every tar in the folder is checked against its checksum before
use. A complete file is never deleted.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from dist_mem.config import DataConfig
from dist_mem.data.index import DOCUMENTS_NAME, INDEX_NAME, ShardEntry
from dist_mem.data.metadata import ShardError, read_metadata, reading
from dist_mem.data.remote.fetch import FailedRemoteError, RemoteError, WrongRemoteError, hold_lock, writing
from dist_mem.data.shard import Index, ShardSource, cancel_fetches
from dist_mem.data.tokenizers.registry import FILE_NAMES, JSON_NAME
from dist_mem.runtime.environment import node_name, temporary_dir
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import (
    NotOwnError,
    fsync_path,
    make_own,
    open_regular,
    read_regular,
    sha256_of,
    write_bytes,
    write_hashed,
    write_text,
)

log = logging.getLogger(__name__)
WHOLE_NAME = "whole.json"  # marks a folder whose files were all compared with their checksums
KEY = "data.stage_dir"
MEMORY_DIR = Path("/dev/shm")
BLOCK_BYTES = 2**22  # of one read: network file systems are faster with large reads
NUM_COPIERS = 4  # tars at a time: one stream seldom saturates a network
SPARE_BYTES = 2**24  # left free, for small files of all users


def stage(index: Index, data: DataConfig) -> Index:
    """Return a split that is read from this node's copy, which is made when the first tar is fetched.

    Args:
        index: of data.path, or of its place in the cache.
    """
    if data.stage == "none":
        return index
    source = StagedShards(index, _root(data))
    return replace(index, split_dir=source.split_dir, source=source, maps={})


def stage_on_all_ranks(indexes: Sequence[Index], what: str) -> None:
    """Copy splits to every node: one process of a node copies while the others wait; every rank calls it.

    Args:
        indexes: opened by `stage`.

    Raises:
        RunError: on every rank, as soon as it has failed on any.
        StoppedEarlyError: on every rank, soon after a signal to any.
    """
    from dist_mem.runtime.rounds import work_in_rounds  # it imports torch

    sources = [index.source for index in indexes if isinstance(index.source, StagedShards)]

    def copy() -> None:
        for source in sources:
            source.fill()

    work_in_rounds(copy, what, cancel=lambda: cancel_fetches(indexes))


class StagedShards(ShardSource):
    """The tars of a split on this node, copied by the first process that needs one."""

    def __init__(self, index: Index, root: Path) -> None:
        self._index = index  # the source of the copies
        self._folder = root / f"{index.name}-{index.split}-{index.fingerprint[:12]}"
        self.split_dir = self._folder / index.split
        self._closed = threading.Event()
        self._is_filled = False  # whether this process has filled or checked the folder

    def fetch(self, shard: ShardEntry) -> None:
        """Return when the tar is there; copy it again if it was removed meanwhile. Raises OSError."""
        if not (self._is_filled and self._is_there(shard)):
            self.fill()

    def close(self) -> None:
        """Cancel all copies, also in other threads: their `fetch` raises RemoteError."""
        self._closed.set()
        self._index.source.close()

    def fill(self) -> None:
        """Copy missing files, or wait for the process of this node that copies them.

        Raises:
            RemoteError: a file cannot be read or written, or `close` was called; names this node.
            ShardError: a file of the source is missing or damaged.
        """
        root, name = self._folder.parent, self._folder.name
        try:
            with writing(root, key=KEY):
                make_own(root)
            if not self._is_whole():
                with hold_lock(root / f".{name}.lock", self._closed, key=KEY), writing(self._folder, key=KEY):
                    if not self._is_whole():  # another process may have filled it while we waited
                        self._copy()
        except NotOwnError as error:
            raise WrongRemoteError(f"node {node_name()}: {error}; set {KEY}") from error
        except RemoteError as error:
            raise type(error)(f"node {node_name()}: {error}") from error
        self._is_filled = True

    def _is_there(self, shard: ShardEntry) -> bool:
        try:
            return (self.split_dir / shard.name).stat().st_size == shard.bytes
        except FileNotFoundError:
            return False

    def _is_marked(self) -> bool:
        try:
            return bool(read_metadata(self._folder / WHOLE_NAME).get("fingerprint") == self._index.fingerprint)
        except ShardError:
            return False

    def _is_whole(self) -> bool:
        return self._is_marked() and all(map(self._is_there, self._index.shards))

    def _copy(self) -> None:
        begin = time.monotonic()
        self.split_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Without the mark, a job was killed while it copied.
        is_right = self._is_there if self._is_marked() else self._is_good
        missing = [shard for shard in self._index.shards if not is_right(shard)]
        for shard in missing:
            self._partial(shard).unlink(missing_ok=True)  # of a process that was killed
        size = sum(shard.bytes for shard in missing)
        self._check_space(size)
        log.warning("copying %s bytes, %s of %s, to %s", f"{size:,}", self._index.split, self._index.name, self._folder)
        with ThreadPoolExecutor(NUM_COPIERS, thread_name_prefix="stage") as pool:
            copies = [pool.submit(self._copy_shard, shard) for shard in missing]
            try:
                for copy in as_completed(copies):
                    copy.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._copy_metadata()
        fsync_path(self.split_dir)
        metadata = {"format_version": 1, "fingerprint": self._index.fingerprint, "from": str(self._index.split_dir)}
        write_text(self._folder / WHOLE_NAME, json_text(metadata) + "\n")
        log.warning("%s: whole, after %.1f s", self._folder, time.monotonic() - begin)

    def _is_good(self, shard: ShardEntry) -> bool:
        return self._is_there(shard) and sha256_of(self.split_dir / shard.name) == shard.sha256

    def _partial(self, shard: ShardEntry) -> Path:
        return self.split_dir / f"{shard.name}.partial"

    def _check_space(self, size: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if size and size + SPARE_BYTES > free:
            raise FailedRemoteError(
                f"{self._folder} needs {size:,} bytes, but {free:,} are free there, of which {SPARE_BYTES:,} stay so; "
                f"make room, set {KEY} to a larger disk, or data.stage to none"
            )

    def _copy_shard(self, shard: ShardEntry) -> None:
        self._index.source.fetch(shard)
        source, path = self._index.split_dir / shard.name, self.split_dir / shard.name
        partial = self._partial(shard)
        try:
            found = write_hashed(partial, _read_pieces(source, self._closed))
            if found != {"bytes": shard.bytes, "sha256": shard.sha256}:
                raise ShardError(
                    f"{source} has {found['bytes']:,} bytes with sha256 {found['sha256'][:12]}, but {INDEX_NAME} says "
                    f"{shard.bytes:,} with {shard.sha256[:12]}: build (--overwrite) or copy it again"
                )
            partial.chmod(0o444)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _copy_metadata(self) -> None:
        """Copy index and tokenizer, which make the folder a data directory; jobs read those of the source."""
        source = self._index.split_dir
        for name in (DOCUMENTS_NAME, INDEX_NAME):
            write_bytes(self.split_dir / name, read_regular(source / name))
        for name in (JSON_NAME, *FILE_NAMES):
            if (source.parent / name).exists():
                write_bytes(self._folder / name, read_regular(source.parent / name))


def _read_pieces(path: Path, closed: threading.Event) -> Iterator[memoryview]:
    """Yield the content of a source file in blocks."""
    block = memoryview(bytearray(BLOCK_BYTES))
    try:
        with reading(path, ": build (--overwrite) or copy it again"), open_regular(path, buffering=0) as file:
            while size := file.readinto(block):
                if closed.is_set():
                    raise FailedRemoteError(f"{path}: given up, the reader was closed")
                yield block[:size]
    except RemoteError:
        raise
    except OSError as error:
        raise FailedRemoteError(f"{path} cannot be read: {error.strerror or error}") from error


def _root(data: DataConfig) -> Path:
    """Return this user's folder for staged data on this node."""
    usual = MEMORY_DIR if data.stage == "memory" else temporary_dir()
    return (Path(data.stage_dir).expanduser() if data.stage_dir else usual) / f"dist_mem-{os.getuid()}"

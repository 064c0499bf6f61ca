"""Open an index.json: a small one is read, a large one becomes a file of columns once, and is mapped from then on."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_mem.data.index_file import (
    MappedIndex,
    OtherIndexError,
    WrongFileError,
    in_memory,
    map_index_file,
    write_index_file,
)
from dist_mem.data.index_json import IndexContent, read_index_json
from dist_mem.data.metadata import BUILD_FIRST, reading
from dist_mem.runtime.environment import user_cache_dir
from dist_mem.runtime.files import sha256_of

log = logging.getLogger(__name__)
FILE_NAME = "index.safetensors"
MAPPED_FROM = 2**20  # bytes of index.json, about 2,500 documents; a smaller one is read in a tenth of a second


def open_index_json(path: Path) -> MappedIndex:
    """Read and check an index.json; map its columns if it is large.

    Raises:
        ShardError: it is missing, damaged, or of a newer format.
    """
    with reading(path, BUILD_FIRST):
        is_small = path.stat().st_size < MAPPED_FROM
    return in_memory(read_index_json(path)) if is_small else open_mapped(path)


def open_mapped(path: Path) -> MappedIndex:
    """Map the columns of an index.json; write their file first if there is none, beside it or in the user's cache.

    Of several processes that need the file at once, one writes it. If it cannot be written anywhere, warn and return
    columns in memory. Raises ShardError as `open_index_json`.
    """
    with reading(path, BUILD_FIRST):
        sha256 = sha256_of(path)
    places = [path.with_name(FILE_NAME), user_cache_dir() / "dist_mem" / "indexes" / f"{sha256}.safetensors"]
    for place in places:
        if (found := _find(place, path, sha256)) is not None:
            return found
    content: IndexContent | None = None
    problems = []
    for place in places:
        try:
            with _locked(place):
                if (found := _find(place, path, sha256)) is not None:
                    return found  # of a process that we have waited for
                content = content or read_index_json(path)
                write_index_file(place, content)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
            continue
        return map_index_file(place, path, content.sha256)
    content = content or read_index_json(path)
    log.warning(
        "%s: its columns cannot be kept in a file (%s), so every process reads all of it, every time; make one of the "
        "folders writable",
        path,
        "; ".join(problems),
    )
    return in_memory(content)


def _find(place: Path, path: Path, sha256: str) -> MappedIndex | None:
    try:
        return map_index_file(place, path, sha256)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OtherIndexError:
        return None  # the index has changed since
    except (WrongFileError, OSError) as error:
        log.warning("%s cannot be used: %s; it is made again from %s", place, error, path.name)
        return None


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock of a file that is about to be written. Raises OSError if its folder cannot be written.

    The lock file is removed. Whoever has waited for the removed one finds the file written; if it could not be written,
    two processes may write it at once, each whole.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f".{place.name}.lock")
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                lock.unlink()

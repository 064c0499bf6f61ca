"""Texts in tars of other people: webdataset's shards, whose samples have a .txt or a .json member; local or by URL.

    x/{000..063}.tar          ->  x/000.tar, x/001.tar, ...
    https://host/x/000.tar    ->  its copy in the cache (data.cache), fetched once

webdataset's reader groups the members of a sample and decompresses. It ends silently where a header is damaged or the
tar is cut between two members, and passes over links, so `survey` follows the headers to the end mark first.
"""

from __future__ import annotations

import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from dist_mem.config import DataConfig
from dist_mem.data.directory import local_dir
from dist_mem.data.remote.fetch import address, check_address, download, is_remote, locked, show
from dist_mem.data.tar import BLOCK_BYTES
from dist_mem.datasets.tree import Found, check_name, shown, suffix_of
from dist_mem.errors import UnusableError
from dist_mem.runtime.names import check_plain, is_hidden

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
MEMBERS = ("txt", "json")  # what webdataset calls the suffix: all after the first dot of the file name
MAX_BYTES = 2**36  # of a tar by URL
LOCK_NAME = ".lock"
REMEDY = "copy it again"


class Sample(NamedTuple):
    """The members of a sample that are read."""

    key: str  # path in the tar without suffix
    members: dict[str, bytes]  # of `MEMBERS`


def local_sources(sources: Sequence[str], cache: str | None) -> list[Path]:
    """Return the paths of sources; numbers and words in braces are expanded, and tars by URL fetched into the cache.

    Raises:
        UnusableError: there is no such path, or a URL is of no tar.
        RemoteError: a tar cannot be fetched, or is damaged there.
    """
    from webdataset.shardlists import expand_urls

    paths = []
    for source in sources:
        is_pattern = "{" in source and not Path(source).exists()
        for each in expand_urls(source) if is_pattern else [source]:
            path = _fetched(each, cache) if is_remote(each) else Path(each)
            if not path.exists():
                raise UnusableError(f"there is no {shown(path)}")
            paths.append(path)
    return paths


def survey(path: Path) -> Found:
    """Follow the headers of a tar to its end, and return which members are hidden, and how many samples lack a text.

    Raises:
        UnusableError: the tar is damaged, no sample has a text, a name is not UTF-8, or a text is a link.
    """
    hidden: list[str] = []
    keys: dict[str, bool] = {}  # of samples -> whether one has a text
    with _reading(path), tarfile.open(path) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            key, suffix = _key(member.name)
            if not member.isfile():
                if _is_read(member.name) and not member.isdir():
                    # GNU tar stores the second name of a file as a hard link, which has no content.
                    raise UnusableError(
                        f"{shown(path)}: {shown(member.name)} is a link, a pipe or a device, not a file: leave it out, "
                        "or pack its folder again with tar --dereference --hard-dereference"
                    )
                continue
            if any(is_hidden(part) for part in member.name.split("/") if part != "."):
                hidden.append(f"{path.name}/{member.name}")
            else:
                keys[key] = keys.get(key, False) or suffix in MEMBERS
                if suffix in MEMBERS:
                    check_name(path / member.name, member.name)
        end = tar.offset
        assert tar.fileobj is not None
        tar.fileobj.seek(end)
        if tar.fileobj.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
            raise UnusableError(f"{shown(path)} is damaged (no header and no end at byte {end:,}): {REMEDY}")
        while block := tar.fileobj.read(2**20):
            if block.strip(b"\0"):
                raise UnusableError(f"{shown(path)} has bytes after its end: pack its files again, as one tar")
    if not any(keys.values()):
        raise UnusableError(f"{shown(path)} has no sample with a member .txt or .json: see --help for what is read")
    without = list(keys.values()).count(False)
    return Found({}, hidden, +Counter({"samples without .txt and .json": without}))


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples that have a text, in the order of the tar.

    Raises:
        UnusableError: the tar is damaged, or has a member twice.
    """
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    with _reading(path), path.open("rb") as stream:
        # skip_meta would leave out the texts of a folder such as __data__.
        files = tar_file_iterator(stream, skip_meta=None, select_files=_is_read)
        try:
            for sample in group_by_keys({**file, "__url__": str(path)} for file in files):
                yield Sample(sample["__key__"], {name: sample[name] for name in MEMBERS if name in sample})
        except ValueError as error:
            raise UnusableError(f"{shown(path)}: {str(error.args[0]).partition(' ')[0]} is twice in it") from error


def _is_read(name: str) -> bool:
    return _key(name)[1] in MEMBERS and not any(is_hidden(part) for part in name.split("/") if part != ".")


def _key(name: str) -> tuple[str, str]:
    """Return key and suffix of a member, as webdataset cuts its name."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise UnusableError with the name of the tar if it is damaged."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error.args[0] if error.args else error).partition(" @ ")[0].partition(":\n")[0]
        raise UnusableError(f"{shown(path)} is damaged or no tar ({reason}): {REMEDY}") from error


def _fetched(url: str, cache: str | None) -> Path:
    check_address(url, "--source")
    parts = urlsplit(url)
    folder, _, last = parts.path.rpartition("/")
    name = unquote(last)
    check_plain(name, f"the file name of --source {show(url)}")
    if suffix_of(name, TAR_SUFFIXES) is None:
        raise UnusableError(f"--source {show(url)}: only files of {', '.join(TAR_SUFFIXES)} are read by URL")
    base = urlunsplit(parts._replace(path=folder))
    path = local_dir(DataConfig(path=base, cache=cache)) / name
    with locked(path.with_name(LOCK_NAME)):
        if not path.exists():
            print(f"fetching {show(url)}", flush=True)
            download(address(base, name), path, limit=MAX_BYTES, verify=survey)
    return path

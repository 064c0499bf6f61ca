"""Texts in tars of other people: webdataset's shards, whose samples have a .txt or a .json member; local or by URL.

    x/{000..063}.tar          ->  x/000.tar, x/001.tar, ...
    https://host/x/000.tar    ->  its copy in the cache (data.cache), fetched again if the server has another version

One function reads the names before a build and the texts during it, from one decompressed stream. webdataset's own
reader stops after the first member of a gzip file and where a header is damaged, cuts names at their first dot, and
takes members of a sample that are apart for two samples.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import unquote, urlunsplit

from dist_mem.config import DataConfig
from dist_mem.data.directory import local_dir
from dist_mem.data.remote.copies import update
from dist_mem.data.remote.fetch import address, check_address, hold_lock, is_remote, parts_of, show
from dist_mem.data.tar import BLOCK_BYTES
from dist_mem.datasets.tree import TreeFiles, check_name, describe_passed_over, kind_of, printable_name, suffix_of
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import MAX_TEXT_BYTES
from dist_mem.runtime.names import check_plain, is_hidden

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
MEMBERS = ("txt", "json")  # suffixes
DOTTED = ".json with a second dot in its name"
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {  # by how a file begins
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
}
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
            path = _fetch(each, cache) if is_remote(each) else Path(each)
            if not path.exists():
                raise UnusableError(f"there is no {printable_name(path)}")
            paths.append(path)
    return paths


def survey(path: Path) -> TreeFiles:
    """Read the names of a tar to its end, and return what `read_samples` passes over.

    Raises:
        UnusableError: as `read_samples`; or no member is a text.
    """
    found = TreeFiles({}, [], Counter())
    if not sum(1 for _ in _samples(path, found, lambda tar, member: b"")):
        over = describe_passed_over(found)
        raise UnusableError(
            f"{printable_name(path)} has no member .txt or .json that is a text: see --help for what is read"
            f"{f'; passed over {over}' if over else ''}"
        )
    return found


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples that have a text, in the order of the tar.

    Raises:
        UnusableError: the tar is damaged, has a member twice or those of a sample apart, a name is not UTF-8, or a text
            is a link or too long.
    """
    return _samples(path, TreeFiles({}, [], Counter()), _content)


def _samples(
    path: Path, found: TreeFiles, read: Callable[[tarfile.TarFile, tarfile.TarInfo], bytes]
) -> Iterator[Sample]:
    """Yield the samples, and add to `found` what is passed over; the only reader of tars.

    A sample is open until a member comes whose key is another one. If that key goes on after a dot, both are open:
    sorted by name, s0.more.txt is between s0.json and s0.txt.
    """
    names: set[str] = set()
    opened: list[Sample] = []
    for tar, member in _members(path):
        key, suffix = _key(member.name)
        if any(is_hidden(part) for part in member.name.split("/") if part != "."):
            found.hidden.extend([f"{path.name}/{member.name}"] * member.isfile())
        elif suffix not in MEMBERS:
            found.others[kind_of(member.name)] += member.isfile()
        elif not member.isdir():
            while opened and not f"{key}.".startswith(f"{opened[-1].key}."):
                yield from _close_sample(opened.pop(), found)
            if not (opened and opened[-1].key == key):
                opened.append(Sample(key, {}))
            _check_member(path, member, names, is_begun=bool(opened[-1].members))
            opened[-1].members[suffix] = read(tar, member)
    while opened:
        yield from _close_sample(opened.pop(), found)


def _members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the entries of a tar up to its end mark.

    tarfile ends in silence where a header is damaged, or where the tar is cut between two members.
    """
    with _reading(path), _open_decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            if member.size < 0:
                raise tarfile.ReadError("a negative size")
            yield tar, member
        end = tar.offset
        stream.seek(end)
        if stream.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
            raise UnusableError(f"{printable_name(path)} is damaged (no header and no end at byte {end:,}): {REMEDY}")
        while block := stream.read(2**20):
            if block.strip(b"\0"):
                raise UnusableError(f"{printable_name(path)} has bytes after its end: pack its files again, as one tar")


def _open_decompressed(path: Path) -> IO[bytes]:
    """Open the decompressed content of a file, whatever its name says; all members of a compressed one."""
    with path.open("rb") as file:
        begin = file.read(10)
    for pattern, opened in _COMPRESSED.items():
        if re.match(pattern, begin, re.DOTALL):
            return cast(IO[bytes], opened(path))
    return path.open("rb")


def _check_member(path: Path, member: tarfile.TarInfo, names: set[str], *, is_begun: bool) -> None:
    """Raise UnusableError for a text that cannot be read or assigned to its sample, and add its name to `names`.

    Args:
        is_begun: the sample of the member is open, and has another member.
    """
    where = f"{printable_name(path)}: {printable_name(member.name)}"
    if not member.isfile():
        # GNU tar stores the second name of a file as a hard link, which has no content.
        raise UnusableError(
            f"{where} is a link, a pipe or a device, not a file: leave it out, or pack its folder again with "
            "tar --dereference --hard-dereference"
        )
    check_name(path / member.name, member.name)
    if member.size > MAX_TEXT_BYTES:
        raise UnusableError(f"{where} has {member.size:,} bytes, more than {MAX_TEXT_BYTES:,}: cut it")
    key, suffix = _key(member.name)
    if f"{key}.{suffix}" in names:
        raise UnusableError(f"{where} is twice in it: rename one, or leave it out")
    if not is_begun and any(f"{key}.{other}" in names for other in MEMBERS):
        raise UnusableError(f"{where}: the members of this sample are apart: pack the tar again with tar --sort=name")
    names.add(f"{key}.{suffix}")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "a member that is no file is refused before"
    return file.read()


def _close_sample(sample: Sample, found: TreeFiles) -> Iterator[Sample]:
    """Yield a sample, unless it is what another program has beside its texts, as s0.meta.json beside s0.txt."""
    if "txt" not in sample.members and "." in sample.key.rpartition("/")[2]:
        found.others[DOTTED] += 1
    else:
        yield sample


def _key(name: str) -> tuple[str, str]:
    """Return key and suffix of a member; names of texts may have dots, so that the suffix follows the last one."""
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.rpartition(".")
    return (f"{folder}{slash}{stem}", suffix.lower()) if dot else (name, "")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise UnusableError with the name of the tar if it is damaged."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        if isinstance(error, UnusableError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        reason = str(error.args[0] if error.args else error).partition(" @ ")[0].partition(":\n")[0]
        raise UnusableError(f"{printable_name(path)} is damaged or no tar ({reason}): {REMEDY}") from error


def _fetch(url: str, cache: str | None) -> Path:
    check_address(url, "--source")
    parts = parts_of(url)
    folder, _, last = parts.path.rpartition("/")
    name = unquote(last) if parts.scheme in ("http", "https") else last
    check_plain(name, f"the file name of --source {show(url)}")
    if suffix_of(name, TAR_SUFFIXES) is None:
        raise UnusableError(f"--source {show(url)}: only files of {', '.join(TAR_SUFFIXES)} are read by URL")
    base = urlunsplit(parts._replace(path=folder))
    path = local_dir(DataConfig(path=base, cache=cache)) / name
    with hold_lock(path.with_name(LOCK_NAME)):
        update(address(base, name), path, limit=MAX_BYTES, verify=survey, report=partial(print, flush=True))
    return path

"""Durable, atomic file writes: a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count, takewhile
from pathlib import Path
from typing import IO, Any

_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs"),
    *("pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
}
_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EEXIST),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
_CHUNK = 1 << 20  # bytes; written and hashed while they are in the processor's cache


def fsync_path(path: Path) -> None:
    """Flush a file, or the list of names of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NotOwnError(Exception):
    """Others could have put files into a folder that must belong to this user alone."""


def make_own(folder: Path) -> None:
    """Make a folder to which only this user can write, inside one to which everybody can.

    Raises:
        NotOwnError: the path exists and belongs to another user, is writable by others, or is not a folder.
        OSError: the folder cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NotOwnError(f"{folder} must be a folder of this user into which nobody else can write")


def make_folder(path: Path) -> None:
    """Make a directory and its missing parents, durably; an existing directory is no error."""
    missing = list(takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_path(folder.parent)


def at_home(text: str) -> str:
    """Return a path, or the address of an SQLite file, with a leading `~` or `~user` as that home directory.

    Shells expand `~` only at the beginning of a word: not in `data.path=~/books`, and in no file.
    """
    scheme = re.match(r"sqlite[^:/]*:///|", text)
    assert scheme is not None, "it may be empty"
    return scheme[0] + os.path.expanduser(text[scheme.end() :])  # noqa: PTH111  # Path would raise, and change texts


def home_fault(text: str) -> str | None:
    """Return why a path that `at_home` has left with `~` cannot be used; None if there is none."""
    if not text.startswith("~"):
        return None
    return f"~ stands for no home directory here; give the whole path, or ./{text} for a folder of that name"


def is_file(path: Path) -> bool:
    """Return whether a file exists; False also for an impossible name: too long, or with a zero byte."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def is_dir(path: Path) -> bool:
    """Return whether a folder exists; False also for an impossible name, as in `is_file`."""
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False


def is_wrong_path(error: OSError) -> bool:
    """Return whether the path itself is wrong: another path may work, but neither free space nor a repair helps."""
    return error.errno in _WRONG_PATH


def free_name(path: Path) -> Path:
    """Return the path, or the first of PATH-2, PATH-3, ..., that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(name for name in chain([path], numbered) if not name.exists())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError without one; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that durably replaces `path` at the end of the block, and is deleted after an error."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with naming(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk it would take the space of the next attempt
        raise
    fsync_path(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` with a file of this content, atomically and durably."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with a file of this text in UTF-8, atomically and durably."""
    write_bytes(path, text.encode())


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file durably and hash it meanwhile; return its {"bytes", "sha256"}.

    A crash may leave half a file, so use this in a directory that is renamed once all its files are complete.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    digest, size = hashlib.sha256(), 0
    with naming(path), path.open("xb") as file:
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), _CHUNK):
                chunk = view[begin : begin + _CHUNK]
                file.write(chunk)
                digest.update(chunk)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_system_of(path: Path) -> str:
    """Return the type of the file system of a path, which need not exist yet: ext4, nfs4, lustre, fuse.sshfs.

    Return an empty text if the kernel does not list its mounts, as on systems other than Linux.
    """
    folders = [path.resolve(), *path.resolve().parents]  # first: with autofs, this access mounts it
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found = [(len(mounted.parts), kind) for mounted, kind in map(_mount, mounts) if mounted in folders]
    deepest = max((depth for depth, _ in found), default=0)
    return next((kind for depth, kind in reversed(found) if depth == deepest), "")  # a later mount hides earlier ones


def _mount(line: str) -> tuple[Path, str]:
    """Return folder and type from a line of /proc/self/mounts, in which \\040 is a blank."""
    folder, kind = line.split(" ")[1:3]
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), folder)), kind


def is_network_file_system(kind: str) -> bool:
    """Return whether another machine serves such files: locks are slow or missing there, which breaks SQLite."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")

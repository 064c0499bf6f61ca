"""Files and folders: reads of what others may have made, and durable, atomic writes.

A crash leaves the old file or the new one, never half of one:

    page.html -> .page.html.3f9a01-4711.partial, which replaces it at the end

The name has the process that writes: the first write of the next process into that folder removes what is left of
processes that were killed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedRandom
from itertools import chain, count, takewhile
from pathlib import Path
from typing import IO, Any, cast

from dist_mem.errors import UnusableError
from dist_mem.runtime.processes import is_running, pid_scope

_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EEXIST),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO),  # ENXIO: of a socket, and of a pipe without a reader
}
_NO_FILE = {
    errno.EISDIR: "a folder where a file must be; move it away",
    errno.ENXIO: "a pipe, device or socket where a file must be; move it away",
    errno.ELOOP: "a link that leads nowhere; remove it",
    errno.ENOTDIR: "a file where a folder of its path must be; move it away",
}
PARTIAL = re.compile(r"\..+\.([0-9a-f]{6})-(\d{1,9})\.partial")  # a name of `partial_of`
_ABANDONED_SECONDS = 86_400.0  # without a change: of a process that this one cannot see, as on another host
MAX_TEXT_BYTES = 1 << 30  # of one text that is read as a whole: about a thousand novels
_READERS = 32  # files that `read_together` reads at once
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


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that must be made for this one to exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def drop_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, that nothing has been put into."""
    with suppress(OSError):  # one is not empty, or does not exist: then those around it stay too
        for folder in folders:
            folder.rmdir()


def at_home(text: str) -> str:
    """Return a path, or the address of an SQLite file, with a leading `~` or `~user` as that home directory.

    Shells expand `~` only at the beginning of a word: not in `data.path=~/books`, and in no file.
    """
    scheme = re.match(r"sqlite[^:/]*:///|", text)
    assert scheme is not None, "it may be empty"
    return scheme[0] + os.path.expanduser(text[scheme.end() :])  # noqa: PTH111  # Path would raise, and change texts


def expansion_fault(text: str) -> str | None:
    """Return why a path that a shell would have expanded, and `at_home` has not, cannot be used; None if it can."""
    path = re.sub(r"^sqlite[^:/]*:///", "", text)
    there = f"or ./{path} for a folder of that name"
    if path.startswith("~"):
        return f"~ stands for no home directory here; give the whole path, {there}"
    if found := re.match(r"\$\{?([A-Za-z_]\w*)", path):
        name = found[1]
        return (
            f"no shell expands ${name} here; in a configuration write ${{oc.env:{name}}}; else the whole path, {there}"
        )
    return None


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


class WrongFileError(OSError, UnusableError):
    """What stands under the name of a file cannot be opened as one, whatever the machine does: a pipe, a folder."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: Path, mode: str = "rb", *, inside: Path | None = None, buffering: int = -1) -> BufferedRandom:
    """Open a file of a folder that others may have made; all files of runs, data, exports and memories open here.

    A read of a named pipe would wait for a writer, without end, and one of a device may change it. What is checked is
    the descriptor that is used.

    Args:
        mode, buffering: as for `open`.
        inside: the folder that the file must be in; None: a link may lead anywhere.

    Raises:
        WrongFileError: it is a pipe, a device, a socket or a folder, a link in a circle, or one out of `inside`.
        OSError: it is missing, or its disk fails.
    """
    place = str(path) if inside is None else os.path.realpath(path)
    if inside is not None and not Path(place).is_relative_to(os.path.realpath(inside)):
        raise WrongFileError(errno.ELOOP, f"a link out of {inside}; put a copy of the file in its place", str(path))

    def open_checked(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if inside is None else os.O_NOFOLLOW)
        with _refusing(path):
            number = os.open(name, flags, 0o666)
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode):
            return number
        os.close(number)
        wrong = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise WrongFileError(wrong, _NO_FILE[wrong], str(path))

    # A type that has what every mode has; Path.open takes no opener.
    return cast(BufferedRandom, open(place, mode, buffering, opener=open_checked))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise WrongFileError for an error that lasts until somebody changes the path."""
    try:
        yield
    except OSError as error:
        kind = errno.ELOOP if error.errno == errno.ENOENT and path.is_symlink() else error.errno
        if kind not in _WRONG_PATH or kind in (errno.ENOENT, errno.EEXIST):
            raise
        raise WrongFileError(kind, _NO_FILE.get(kind, error.strerror), str(path)) from error


def read_regular(path: Path, *, inside: Path | None = None) -> bytes:
    """Return the content of a file. Raises as `open_regular`."""
    with open_regular(path, inside=inside) as file:
        return file.read()


def read_together(paths: Sequence[Path]) -> list[bytes]:
    """Return the contents of many files, as of one for each rank: a busy file system answers late for each of them.

    Raises as `open_regular`.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read_regular, paths))


@contextmanager
def by_name(path: Path) -> Iterator[str]:
    """Provide a name of the file that `open_regular` has opened, for a library that opens files itself."""
    with open_regular(path) as file:
        yield f"/dev/fd/{file.fileno()}"


def is_missing(path: Path) -> bool:
    """Return whether nothing has this name, not even a link. Raises as `open_regular`."""
    try:
        with _refusing(path):
            path.lstat()
    except FileNotFoundError:
        return True
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
    """Open a temporary file that durably replaces `path` at the end of the block, and is deleted after an error.

    A link is replaced, not followed: it may lead anywhere. A pipe and a character device, as /dev/null, are written to.

    Raises:
        FileExistsError: the path exists, and can be neither replaced nor written to; or nobody reads the pipe.
    """
    if not check_replaceable(path):
        with naming(path), _open_stream(path) as file:
            yield file
        return
    partial = partial_of(path)
    try:
        with naming(path), partial.open("wb") as file:
            _remove_abandoned(partial)
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk it would take the space of the next attempt
        raise
    fsync_path(path.parent)


def check_replaceable(path: Path) -> bool:
    """Return whether a path can be replaced by a file, and not only written to, as a pipe or a character device.

    Raises:
        FileExistsError: it is a folder, a socket or a disk.
    """
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return True  # there is no such file yet; any other error is reported where it is made
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return True
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return False
    what = "is a folder" if stat.S_ISDIR(mode) else "is a socket or a disk"
    raise FileExistsError(errno.EEXIST, f"{what}: give the name of a file", str(path))


def _open_stream(path: Path) -> IO[bytes]:
    try:
        number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # of a pipe without a reader, others would wait for ever
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise FileExistsError(errno.EEXIST, "is a pipe that nobody reads: start its reader first", str(path)) from error
    os.set_blocking(number, True)
    return os.fdopen(number, "wb")


def partial_of(path: Path) -> Path:
    """Return the name under which this process writes what will be `path`."""
    return path.with_name(f".{path.name}.{_scope()}-{os.getpid()}.partial")


@cache
def _scope() -> str:
    return hashlib.sha256(pid_scope().encode()).hexdigest()[:6]


_searched: set[Path] = set()  # folders


def _remove_abandoned(own: Path) -> None:
    """Remove what killed processes have left in the folder of a new partial file or folder, once a process."""
    folder = own.parent.absolute()
    if folder in _searched:
        return
    _searched.add(folder)
    with suppress(OSError):  # of others, or just renamed
        now = own.stat().st_mtime  # of the disk's clock, as that of the others
        for path in folder.iterdir():
            found = PARTIAL.fullmatch(path.name)
            if found is None or path.name == own.name:
                continue
            is_seen = found[1] == _scope()
            if is_running(int(found[2])) if is_seen else now - path.lstat().st_mtime < _ABANDONED_SECONDS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Provide an empty folder that is durably renamed to `path` at the end of the block, or removed after an error.

    Raises:
        FileExistsError: another process has made `path` meanwhile.
    """
    path = path.absolute()
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this number
    partial.mkdir(parents=True)
    try:
        _remove_abandoned(partial)
        yield partial
        for folder in [partial, *(each for each in partial.rglob("*") if each.is_dir())]:
            fsync_path(folder)
        _rename_folder(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_path(path.parent)


def _rename_folder(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (
            errno.ENOTEMPTY,
            errno.EEXIST,
            errno.ENOTDIR,
        ):  # which of them depends on the file system
            raise
        raise FileExistsError(errno.EEXIST, "another command has made it meanwhile", str(target)) from error


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


def read_at_most(path: Path, limit: int = MAX_TEXT_BYTES, *, is_regular: bool = False) -> bytes:
    """Return the content of a file, a pipe or a device that has an end within `limit` bytes.

    Args:
        is_regular: take a file only, as `open_regular`.

    Raises:
        UnusableError: it has more; at most `limit` bytes are in memory by then.
        OSError: it cannot be read.
    """
    blocks, size = [], 0
    with open_regular(path) if is_regular else path.open("rb") as file:
        while block := file.read(_CHUNK):
            blocks.append(block)
            size += len(block)
            if size > limit:
                raise UnusableError(f"{path} has more than {limit:,} bytes, the most that a text may have: cut it")
    return b"".join(blocks)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. Raises as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

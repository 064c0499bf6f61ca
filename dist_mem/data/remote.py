"""One file from a URL to a path, whole or not at all: the one door to webdataset's `gopen`.

    with locked(path.with_name(".lock")):
        download(address("https://host/books", "train/index.json"), path, verify=read_facts)

Whatever `gopen` opens is read as a pipe from a program (gsutil, ais, ...) that is watched: one that sends nothing for
STALL_SECONDS is ended, and one that does not end with status 0 has failed. The programs for http(s) and s3 are chosen
here: `gopen` has none for s3, and its curl tries again for a minute in silence and keeps to itself what the server
answered. Faults that may pass are tried again. Messages show no password and no query.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from dist_mem.errors import UnusableError
from dist_mem.files import fsync_path

log = logging.getLogger(__name__)
STALL_SECONDS = 60.0  # without a byte
RETRY_PAUSES = (1.0, 4.0, 16.0)  # seconds before the second attempt, the third, ...
POLL_SECONDS = 0.1
BLOCK_BYTES = 2**20
CURL = ("curl", "--fail", "--silent", "--show-error", "--no-buffer", "--location", "--globoff", "--netrc-optional")
AWS = ("aws", "s3", "cp", "--only-show-errors")
QUOTED_SCHEMES = {"http", "https", "ftps", "sftp", "scp"}  # those that curl opens; others take a name as it is
REFUSAL = re.compile(r"(?:returned error: |error occurred \()(4\d\d)")  # as curl and aws say it
PASSING_STATUS = {"408", "429"}  # of those; the others will be the same next time

Verify = Callable[[Path], object]  # raises ValueError, its text beginning with the path, for a wrong file


class RemoteError(UnusableError, OSError):
    """A remote file cannot be had, or not be kept; the message names it. Not a ShardError: nothing is damaged."""


class UnreachableError(RemoteError):
    """The server does not answer now, and did not when asked again."""


class RefusedError(RemoteError):
    """The server says that the file is not there, or not for us."""


class Address(NamedTuple):
    """Where a file is."""

    url: str  # may hold a password
    shown: str  # the same for people


def is_remote(path: str) -> bool:
    """Whether a data.path is a URL, or a `pipe:` command, and not a directory."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", path) is not None


def show(url: str) -> str:
    """A data.path without what may be secret: user, password and query, and all of a command but its program."""
    if not is_remote(url):
        return url
    if url.startswith("pipe:"):
        return f"pipe:{url.removeprefix('pipe:').split()[0]}"
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def address(base: str, name: str) -> Address:
    """The file `name` ("train/index.json") of the data directory at `base`.

    Raises:
        RemoteError: `base` is a command without a place for the name.
    """
    if base.startswith("pipe:"):
        if "{}" not in base:
            raise RemoteError(f"data.path = {show(base)} ...: write {{}} where the command takes the name of a file")
        return Address(base.replace("{}", shlex.quote(name)), f"{show(base)} ... {name}")
    parts = urlsplit(base)
    name = quote(name) if parts.scheme in QUOTED_SCHEMES else name
    return Address(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}")), f"{show(base)}/{name}")


@contextmanager
def writing(directory: Path, *, key: str = "data.cache") -> Iterator[None]:
    """An error of the disk as ours, with what to do: `key` has chosen the directory."""
    try:
        yield
    except RemoteError:
        raise
    except OSError as error:
        raise RemoteError(
            f"{directory} cannot be written: {error.strerror or error}; make room there, or set {key} to another "
            "directory"
        ) from error


@contextmanager
def locked(path: Path, cancelled: threading.Event | None = None, *, key: str = "data.cache") -> Iterator[IO[bytes]]:
    """Hold a lock file, which stays where it is; a process that ends, in whatever way, lets go of its locks.

    Raises:
        RemoteError: it cannot be written, or `cancelled` was set while another process held it.
    """
    with writing(path.parent, key=key):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    cancelled = cancelled or threading.Event()
    with file:
        while not _is_taken(file, path):
            if cancelled.wait(POLL_SECONDS):
                raise RemoteError(f"{path}: given up, the reader was closed")
        yield file


def download(source: Address, path: Path, *, verify: Verify, cancelled: threading.Event | None = None) -> None:
    """Replace `path` by the file at `source`, atomically; the caller holds a lock on it.

    Raises:
        UnreachableError: after len(RETRY_PAUSES) + 1 attempts.
        RemoteError: the server refuses, sends twice what `verify` does not take, or the disk does not; or `cancelled`.
    """
    cancelled = cancelled or threading.Event()
    partial = path.with_name(f"{path.name}.partial")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _download_verified(source, partial, verify, cancelled)
            fsync_path(partial)
            partial.replace(path)
            fsync_path(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def _download_verified(source: Address, partial: Path, verify: Verify, cancelled: threading.Event) -> None:
    pauses = iter(RETRY_PAUSES)
    was_wrong = False
    while True:
        try:
            _download_once(source, partial, cancelled)
            verify(partial)
            return
        except UnreachableError as error:
            pause = next(pauses, None)
            if pause is None:
                raise UnreachableError(f"{error} ({len(RETRY_PAUSES) + 1} attempts)") from error
            log.warning("%s; asking again in %g s", error, pause)
            cancelled.wait(pause)
        except RemoteError:
            raise
        except ValueError as error:  # of `verify`
            if was_wrong:
                raise RemoteError(str(error).replace(str(partial), source.shown) + _web_page(partial)) from error
            was_wrong = True


def _download_once(source: Address, partial: Path, cancelled: threading.Event) -> None:
    with tempfile.TemporaryFile() as errors, partial.open("wb") as file:
        pipe = _open(source, errors)
        try:
            _copy(pipe.stream, file, source.shown, cancelled)
            status = pipe.proc.wait(STALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{source.shown}: its program did not end for {STALL_SECONDS:g} s") from error
        finally:
            _end(pipe.proc)
            pipe.stream.close()
        if status != 0:
            errors.seek(0)
            raise _failure(source, status, errors.read().decode("utf-8", "replace"))


def _open(source: Address, errors: IO[bytes]) -> Any:
    """A webdataset Pipe: the program as `proc`, its output as `stream`; it complains to `errors`, if we started it."""
    # Imported here because webdataset imports torch, which a local data.path need not pay for.
    from webdataset.gopen import Pipe, gopen, gopen_schemes

    url = source.url
    scheme = urlsplit(url).scheme
    own = {"mode": "rb", "stderr": errors, "start_new_session": True}  # a session, so that it can be ended whole
    try:
        if scheme in ("http", "https"):
            # Our watch ends a silent curl; its own ends it where we were killed.
            return Pipe([*CURL, "--speed-limit", "1", "--speed-time", f"{2 * STALL_SECONDS:.0f}", url], **own)
        if scheme == "pipe":
            return Pipe(url.removeprefix("pipe:"), shell=True, **own)
        if scheme in gopen_schemes:
            return gopen(url)
        if scheme == "s3":
            return Pipe([*AWS, url, "-"], **own)
    except (OSError, ImportError, ValueError) as error:
        raise RemoteError(f"{source.shown} cannot be opened: {error}") from error
    known = ", ".join(sorted({*gopen_schemes, "s3"} - {"__default__"}))
    raise RemoteError(f"{source.shown}: {scheme}: is not among {known}; a local directory is given as its path alone")


def _copy(stream: IO[bytes], file: IO[bytes], shown: str, cancelled: threading.Event) -> None:
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    last = time.monotonic()
    while True:
        if cancelled.is_set():
            raise RemoteError(f"{shown}: given up, the reader was closed")
        if poll.poll(POLL_SECONDS * 1000):
            block = os.read(stream.fileno(), BLOCK_BYTES)
            if not block:
                return
            file.write(block)
            last = time.monotonic()
        elif time.monotonic() - last > STALL_SECONDS:
            raise UnreachableError(f"{shown}: nothing came for {STALL_SECONDS:g} s, after {file.tell():,} bytes")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _failure(source: Address, status: int, complaint: str) -> RemoteError:
    lines = complaint.replace(source.url, source.shown).strip().splitlines()
    text = f"{source.shown}: {lines[-1] if lines else f'its program ended with status {status}'}"
    refusal = REFUSAL.search(text)
    if refusal and refusal[1] not in PASSING_STATUS:
        return RefusedError(f"{text}; check data.path, and whether you may read it")
    return UnreachableError(text)


def _web_page(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(60)
    return f"; it is a web page: {head.decode('utf-8', 'replace')!r}" if head.lstrip().startswith(b"<") else ""


def _is_taken(file: IO[bytes], path: Path) -> bool:
    with writing(path.parent):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True

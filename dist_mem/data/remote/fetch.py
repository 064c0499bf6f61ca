"""Download one file from a URL to a path, completely or not at all.

    with locked(path.with_name(".lock")):
        download(address("https://host/books", "train/index.json"), path, limit=METADATA_BYTES, verify=read_metadata)

A file is read through a pipe from a program (programs.py). The program is killed if it sends nothing for STALL_SECONDS,
or more bytes than the file may have; it has failed if its exit status is not 0. Temporary failures are retried.
Messages show no password and no query.
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
from typing import IO, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from dist_mem.data.remote.programs import CURL_SCHEMES, start
from dist_mem.errors import UnfitError, UnusableError, run_error
from dist_mem.runtime.files import fsync_path

log = logging.getLogger(__name__)
STALL_SECONDS = 60.0  # without a byte
RETRY_PAUSES = (1.0, 4.0, 16.0)  # seconds before the second attempt, the third, ...
POLL_SECONDS = 0.1
BLOCK_BYTES = 2**20
METADATA_BYTES = 2**30  # limit for a file of unknown length: an index.json of three million documents
REFUSAL = re.compile(r"(?:returned error: |error occurred \()(4\d\d)")  # as curl and aws write it
FINAL_ERRORS = re.compile(r"curl: \((?:1|3|60)\)")  # a protocol that is not allowed, a bad URL, a bad certificate
PASSING_STATUS = {"408", "429"}  # temporary refusals; the others are permanent

Verify = Callable[[Path], object]  # raises ValueError, its text beginning with the path, for a wrong file


class RemoteError(OSError):
    """A remote file cannot be fetched or written; the message names it. Not a ShardError: nothing is damaged."""


class WrongRemoteError(UnusableError, RemoteError):
    """Another start would fail too: the address, the file there, a password or a local path is wrong."""


class RefusedError(WrongRemoteError):
    """The server reports that the file does not exist or may not be read."""


class FailedRemoteError(UnfitError, RemoteError):
    """Another start may succeed: the network or a disk failed."""


class UnreachableError(FailedRemoteError):
    """The server does not answer, after retries too."""


class Address(NamedTuple):
    """The location of a file."""

    url: str  # may contain a password
    shown: str  # the same without secrets, for messages


def is_remote(path: str) -> bool:
    """Return whether a data.path is a URL or a `pipe:` command, and not a directory."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", path) is not None


def show(url: str) -> str:
    """Return a data.path without possible secrets: no user, password or query; of a command only its program."""
    if not is_remote(url):
        return url
    if url.startswith("pipe:"):
        return f"pipe:{next(iter(url.removeprefix('pipe:').split()), '')}"
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def address(base: str, name: str) -> Address:
    """Return the address of the file `name` ("train/index.json") in the data directory at `base`.

    Raises:
        WrongRemoteError: `base` is a command without a place for the name.
    """
    if base.startswith("pipe:"):
        if "{}" not in base:
            raise WrongRemoteError(
                f"data.path = {show(base)} ...: write {{}} where the command takes the name of a file"
            )
        return Address(base.replace("{}", shlex.quote(name)), f"{show(base)} ... {name}")
    parts = urlsplit(base)
    name = quote(name) if parts.scheme in CURL_SCHEMES else name  # other programs take it unquoted
    return Address(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}")), f"{show(base)}/{name}")


@contextmanager
def writing(directory: Path, *, key: str = "data.cache") -> Iterator[None]:
    """Turn a disk error into a RemoteError with a fix; `key` is the configuration key of the directory."""
    try:
        yield
    except RemoteError:
        raise
    except OSError as error:
        kind = WrongRemoteError if isinstance(run_error(error), UnusableError) else FailedRemoteError
        raise kind(
            f"{directory} cannot be written: {error.strerror or error}; make room there, or set {key} to another "
            "directory"
        ) from error


@contextmanager
def locked(path: Path, cancelled: threading.Event | None = None, *, key: str = "data.cache") -> Iterator[IO[bytes]]:
    """Hold a lock file, which is never removed; the kernel releases the lock of a process that ends in any way.

    Raises:
        RemoteError: it cannot be written, or `cancelled` was set while another process held it.
    """
    with writing(path.parent, key=key):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    cancelled = cancelled or threading.Event()
    with file:
        while not _try_lock(file, path):
            if cancelled.wait(POLL_SECONDS):
                raise FailedRemoteError(f"{path}: given up, the reader was closed")
        yield file


def download(
    source: Address, path: Path, *, limit: int, verify: Verify, cancelled: threading.Event | None = None
) -> None:
    """Replace `path` with the file at `source`, atomically; the caller holds a lock on it.

    Args:
        limit: largest number of bytes of the file; the download stops if the server sends more.

    Raises:
        UnreachableError: after len(RETRY_PAUSES) + 1 attempts.
        RemoteError: the server refuses, `verify` rejects the file twice, the disk cannot be written, or `cancelled`.
    """
    cancelled = cancelled or threading.Event()
    partial = path.with_name(f"{path.name}.partial")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _download_verified(source, partial, limit, verify, cancelled)
            fsync_path(partial)
            partial.replace(path)
            fsync_path(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def _download_verified(source: Address, partial: Path, limit: int, verify: Verify, cancelled: threading.Event) -> None:
    pauses = iter(RETRY_PAUSES)
    was_wrong = False
    while True:
        try:
            _download_once(source, partial, limit, cancelled)
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
                raise WrongRemoteError(str(error).replace(str(partial), source.shown) + _web_page(partial)) from error
            was_wrong = True


def _download_once(source: Address, partial: Path, limit: int, cancelled: threading.Event) -> None:
    with tempfile.TemporaryFile() as errors, partial.open("wb") as file:
        process = _start(source, errors)
        assert process.stdout is not None
        try:
            _copy(process.stdout, file, source.shown, limit, cancelled)
            status = process.wait(STALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{source.shown}: its program did not end for {STALL_SECONDS:g} s") from error
        finally:
            _end(process)
            process.stdout.close()
        if status != 0:
            errors.seek(0)
            raise _failure(source, status, errors.read().decode("utf-8", "replace"))


def _start(source: Address, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return start(source.url, errors=errors, patience=2 * STALL_SECONDS)
    except FileNotFoundError as error:
        raise WrongRemoteError(f"{source.shown}: the program {error.filename} is not here: install it") from error
    except ValueError as error:
        raise WrongRemoteError(f"{source.shown}: {error}") from error
    except OSError as error:
        raise FailedRemoteError(f"{source.shown}: {error}") from error


def _copy(stream: IO[bytes], file: IO[bytes], shown: str, limit: int, cancelled: threading.Event) -> None:
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    last = time.monotonic()
    while True:
        if cancelled.is_set():
            raise FailedRemoteError(f"{shown}: given up, the reader was closed")
        if poll.poll(POLL_SECONDS * 1000):
            block = os.read(stream.fileno(), BLOCK_BYTES)
            if not block:
                return
            if file.tell() + len(block) > limit:
                raise ValueError(f"{shown} sends more than the {limit:,} bytes that it may have")
            file.write(block)
            last = time.monotonic()
        elif time.monotonic() - last > STALL_SECONDS:
            raise UnreachableError(f"{shown}: nothing came for {STALL_SECONDS:g} s, after {file.tell():,} bytes")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a running program and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(source: Address, status: int, stderr: str) -> RemoteError:
    lines = stderr.replace(source.url, source.shown).strip().splitlines()
    reason = next((line for line in lines if line.startswith("curl: (")), lines[-1] if lines else "")
    text = f"{source.shown}: {reason or f'its program ended with status {status}'}"
    refusal = REFUSAL.search(text)
    if refusal and refusal[1] not in PASSING_STATUS:
        return RefusedError(f"{text}; check the address, and whether you may read it")
    return WrongRemoteError(text) if FINAL_ERRORS.match(reason) else UnreachableError(text)


def _web_page(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(60)
    return f"; it is a web page: {head.decode('utf-8', 'replace')!r}" if head.lstrip().startswith(b"<") else ""


def _try_lock(file: IO[bytes], path: Path) -> bool:
    with writing(path.parent):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True

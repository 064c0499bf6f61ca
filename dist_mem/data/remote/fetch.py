"""Download one file from a URL to a path, completely or not at all.

    with locked(path.with_name(".lock")):
        download(address("https://host/books", "train/index.json"), path, limit=METADATA_BYTES, verify=read_metadata)

fsspec reads the file, in its own thread: http(s) and hf through aiohttp, s3 through s3fs, gs through gcsfs. The calling
thread gives it up if nothing comes for STALL_SECONDS, next to nothing for SLOW_SECONDS, more bytes than the file may
have, or a signal. Temporary failures are retried. Messages show no password and no query.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from math import inf
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from fsspec.callbacks import Callback

from dist_mem.errors import StoppedError, UnfitError, UnusableError, run_error
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import fsync_path, open_regular
from dist_mem.runtime.locks import lock_file, wait_for_lock
from dist_mem.runtime.signals import received_signal

log = logging.getLogger(__name__)
STALL_SECONDS = 60.0  # without a byte
RETRY_PAUSES = (1.0, 4.0, 16.0)  # seconds before the second attempt, the third, ...
SLOW_SECONDS, LEAST_RATE = 300.0, 1024  # bytes a second, on average over that time: a slower server is none
WORD_SECONDS = 30.0  # between two lines about a wait
POLL_SECONDS = 0.1
METADATA_BYTES = 2**30  # limit for a file of unknown length, as index.json
_LIBRARIES = {"http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"}
_STATUS = {FileNotFoundError: 404, PermissionError: 403}  # as fsspec reports them
# Errors of botocore and google-auth, which are imported only for buckets.
_NO_LOGIN = {"DefaultCredentialsError", "NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError"}
_NO_LOGIN |= {"ProfileNotFound", "UnauthorizedSSOTokenError"}
_ADVICE = {  # causes beyond the address
    "s3": "; a public bucket is read without a login by FSSPEC_S3_ANON=true",
    "gs": "; a public bucket is read without a login by FSSPEC_GS_TOKEN=anon",
    "hf": "; a private or gated one needs `hf auth login`",
}
_PASSING_STATUS = {408, 425, 429}  # temporary refusals, as all from 500 to 599
_QUERY = re.compile(r"\?[\w.-]+=.*", re.DOTALL)  # in a key: nobody means a file by that
# Parameters of a URL that select no content, where one of these names is among them; always, without a name.
_CREDENTIALS: dict[frozenset[str], re.Pattern[str]] = {
    frozenset(): re.compile(r"(?i)(access_?|auth_?)?token|api_?key|password|signature|sig|x-(amz|goog)-.*"),
    frozenset({"signature"}): re.compile(r"(?i)awsaccesskeyid|googleaccessid|expires|key-pair-id|policy"),
    frozenset({"sig"}): re.compile(r"(?i)s[eprtv]|spr|sip|ss|srt|sk(oid|tid|t|e|s|v)"),  # Azure
}
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}

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
    """Return whether a data.path is a URL, and not a directory; `pipe:` was one, and has no directory's name."""
    return re.match(r"[a-z][a-z0-9+.-]*://|pipe:", path, re.IGNORECASE) is not None


def parts_of(url: str) -> SplitResult:
    """Cut a URL; a key of object storage, or a path on a hub, may have `#` and `?`: it has no query and no fragment."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("http", "https") or not scheme.isalnum():  # and `pipe:` with a command
        return urlsplit(url)
    netloc, slash, key = rest.partition("/")
    return SplitResult(scheme.lower(), netloc, slash + key, "", "")


def check_address(url: str, what: str = "data.path") -> None:
    """Raise WrongRemoteError if nothing can be read from a URL, or not what it seems to name.

    Args:
        what: the key or option that gives the URL, for the message.
    """
    parts = parts_of(url)
    if parts.scheme not in _LIBRARIES:
        raise WrongRemoteError(
            f"{what} is {show(url)}, but {parts.scheme}: is not among {', '.join(sorted(_LIBRARIES))}: copy the data "
            "to a directory and give its path, or put them on such a server"
        )
    if parts.scheme in ("s3", "gs") and "@" in parts.netloc:
        library = _LIBRARIES[parts.scheme]
        raise WrongRemoteError(
            f"{what} is {show(url)} with a user or password: leave them out, {library} has its own settings"
        )
    if parts.fragment:
        raise WrongRemoteError(f"{what} is {show(url)} with a # behind it, which no server gets: write %23 for it")
    if _QUERY.search(parts.path):
        raise WrongRemoteError(
            f"{what} is {show(url)} with a query, as ?versionId=, which {parts.scheme}: does not have: leave it out; "
            "the newest version of a file is read"
        )


def show(url: str) -> str:
    """Return a data.path without possible secrets: no user, password or query; no command of a `pipe:`."""
    if not is_remote(url):
        return url
    parts = parts_of(url)
    path = "" if parts.scheme == "pipe" else _QUERY.sub("", parts.path).rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))


def identity(url: str) -> str:
    """Return what of a URL selects content: all but the user, the password and signatures, which change daily."""
    query = parse_qsl(parts_of(url).query, keep_blank_values=True)
    names = {name.lower() for name, _ in query}
    kept = [
        (name, value)
        for name, value in query
        if not any(pattern.fullmatch(name) for sign, pattern in _CREDENTIALS.items() if not sign or sign & names)
    ]
    return f"{show(url)}?{urlencode(kept)}" if kept else show(url)


def address(base: str, name: str) -> Address:
    """Return the address of the file `name` ("train/index.json") in the data directory at `base`."""
    parts = parts_of(base)
    name = quote(name) if parts.scheme in ("http", "https") else name  # others take it unquoted
    return Address(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}")), f"{show(base)}/{name}")


@contextmanager
def writing(directory: Path, *, key: str = "data.cache") -> Iterator[None]:
    """Turn a disk error into a RemoteError with a fix; `key` is the key or option that gives the directory."""
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
def hold_lock(path: Path, cancelled: threading.Event | None = None, *, key: str = "data.cache") -> Iterator[IO[bytes]]:
    """Hold a lock file, which stays, as soon as no other process does.

    Raises:
        RemoteError: it cannot be written, or `cancelled` was set while another process held it.
        StoppedError: a signal was received meanwhile.
    """
    with ExitStack() as stack:
        with writing(path.parent, key=key):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock_file(path))
        patience = _Patience(f"{path.parent}, which another process fills", cancelled)
        with writing(path.parent, key=key):
            wait_for_lock(file, patience.check, seconds=inf, what=str(path.parent))
        yield file


def download(
    source: Address,
    path: Path,
    *,
    limit: int,
    verify: Verify,
    cancelled: threading.Event | None = None,
    key: str = "data.cache",
) -> None:
    """Replace `path` with the file at `source`, atomically; the caller holds a lock on it.

    Args:
        limit: largest number of bytes of the file; the download stops if the server sends more.
        key: the key or option that gives the folder of `path`, for messages.

    Raises:
        UnreachableError: after len(RETRY_PAUSES) + 1 attempts.
        RemoteError: the address or the file is wrong, the server refuses, the disk cannot be written, or `cancelled`.
    """
    check_address(source.url, "an address")
    cancelled = cancelled or threading.Event()
    partial = path.with_name(f"{path.name}.partial")
    with writing(path.parent, key=key):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # of a process that was killed
        try:
            _download_verified(source, partial, limit, verify, cancelled)
            fsync_path(partial)
            partial.replace(path)
            fsync_path(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def _download_verified(source: Address, partial: Path, limit: int, verify: Verify, cancelled: threading.Event) -> None:
    def attempt() -> None:
        with open_regular(partial, "wb") as file:
            _transfer(source, file, _DownloadProgress(limit), cancelled)
        verify(partial)

    for is_second in (False, True):
        try:
            _with_retries(attempt, cancelled)
        except RemoteError:
            raise
        except ValueError as error:  # of `verify`, or too long
            if is_second:
                raise WrongRemoteError(str(error).replace(str(partial), source.shown) + _web_page(partial)) from error
        else:
            return


def _with_retries(attempt: Callable[[], None], cancelled: threading.Event) -> None:
    """Repeat an attempt until it reaches the server.

    Raises:
        UnreachableError: none does.
    """
    for pause in (*RETRY_PAUSES, None):
        try:
            return attempt()
        except UnreachableError as error:
            if pause is None:
                raise UnreachableError(f"{error} ({len(RETRY_PAUSES) + 1} attempts)") from error
            log.warning("%s; asking again in %g s", error, pause)
            patience = _Patience("the next attempt", cancelled)
            end = time.monotonic() + pause
            while (left := end - time.monotonic()) > 0:
                patience.check()
                time.sleep(min(left, POLL_SECONDS))
    raise AssertionError


class _Patience:
    """Says from time to time what is waited for, and ends the wait by a signal, or when the reader is closed."""

    def __init__(self, what: str, cancelled: threading.Event | None) -> None:
        self._what = what
        self._cancelled = cancelled or threading.Event()
        self._began = self._last_word = time.monotonic()

    def check(self, news: str = "") -> None:
        """Raise FailedRemoteError or StoppedError if the wait must end."""
        if self._cancelled.is_set():
            raise FailedRemoteError(f"{self._what}: given up, the reader was closed")
        if name := received_signal():
            raise StoppedError(f"{self._what}: stopped by {name}; the same command starts again")
        now = time.monotonic()
        if now - self._last_word > WORD_SECONDS:
            self._last_word = now
            log.warning("waiting for %s: %s%.0f s", self._what, news, now - self._began)


class _DownloadProgress(Callback):
    """Counts the bytes of an attempt, and stops the transfer that brings too many."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.received = 0
        self.last = time.monotonic()
        self.mark = (self.last, 0)  # time and bytes at the begin of the last SLOW_SECONDS

    def relative_update(self, inc: int = 1) -> None:
        self.last = time.monotonic()
        self.received += inc
        if self.received > self.limit:
            raise ValueError(f"more than {self.limit:,} bytes")

    def check(self, source: Address) -> None:
        """Raise UnreachableError if nothing has come for long, or next to nothing for longer."""
        now, (begun, before) = time.monotonic(), self.mark
        if now - self.last > STALL_SECONDS:
            raise UnreachableError(
                f"{source.shown}: nothing came for {STALL_SECONDS:g} s, after {self.received:,} bytes"
            )
        if now - begun > SLOW_SECONDS:
            self.mark = (now, self.received)
            if self.received - before < LEAST_RATE * SLOW_SECONDS:
                raise UnreachableError(
                    f"{source.shown}: only {self.received - before:,} bytes came in {SLOW_SECONDS:g} s, fewer than "
                    f"{LEAST_RATE:,} a second"
                )


def _transfer(source: Address, file: IO[bytes], progress: _DownloadProgress, cancelled: threading.Event) -> None:
    """Write what the server sends into a file; the file system of fsspec runs in fsspec's thread."""
    files, arguments = _request(source, file)
    ended = threading.Event()

    async def run() -> None:
        try:
            await files._get_file(**arguments, callback=progress)
        finally:
            ended.set()

    transfer = asyncio.run_coroutine_threadsafe(run(), files.loop)
    patience = _Patience(source.shown, cancelled)
    try:
        while not wait([transfer], POLL_SECONDS).done:
            patience.check(f"{progress.received:,} bytes in ")
            progress.check(source)
    finally:
        transfer.cancel()
        ended.wait(STALL_SECONDS)  # nothing writes into the file any more
    error = transfer.exception()
    if progress.received > progress.limit:
        raise ValueError(f"{source.shown} sends more than the {progress.limit:,} bytes that it may have")
    if error is not None:
        raise _failure(source, error) from error


def _request(source: Address, file: IO[bytes]) -> tuple[Any, dict[str, Any]]:
    """Return the file system of fsspec that reads an address, and the arguments of its `_get_file`.

    Credentials are sent only over https, and only to the server of the address. A bucket's library writes the file by
    its name.
    """
    import fsspec

    url, headers, scheme = source.url, {"Accept-Encoding": "identity"}, parts_of(source.url).scheme
    for library in (_LIBRARIES[scheme], "aiohttp"):
        require(library, f"data at {scheme}://")
    if scheme in ("s3", "gs"):
        try:
            files = fsspec.filesystem(scheme)
        except Exception as error:  # gcsfs logs in here
            raise _failure(source, error) from error
        return files, {"rpath": url, "lpath": file.name}
    import aiohttp

    if scheme == "hf":
        url, token = _of_hub(source)
        login = f"Bearer {token}" if token else None
    else:
        login = _login(urlsplit(url).hostname or "", source) if "@" not in urlsplit(url).netloc else None
    parts = urlsplit(url)
    if login and parts.scheme == "https":
        headers["Authorization"] = login

    async def follow(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if parts.scheme == "https" and request.url.scheme != "https":
            raise aiohttp.InvalidUrlRedirectClientError(request.url, "https must not lead to http")
        return await handler(request)

    files = fsspec.filesystem("http", client_kwargs={"timeout": aiohttp.ClientTimeout(total=None)})
    proxy = None if proxy_bypass(parts.netloc.rpartition("@")[2]) else getproxies().get(parts.scheme)
    return files, {"rpath": url, "lpath": file, "headers": headers, "proxy": proxy, "middlewares": (follow,)}


def _of_hub(source: Address) -> tuple[str, str | None]:
    """Return URL and token of a file on a Hugging Face hub, without a request to the hub."""
    # Imported here because it takes half a second, and other addresses do not need it.
    from huggingface_hub import get_token, hf_hub_url, parse_hf_uri

    form = "write hf://datasets/OWNER/NAME or hf://OWNER/NAME, and after it @REVISION and /FOLDER where needed"
    try:
        file = parse_hf_uri(source.url)
        if not file.path_in_repo:
            raise ValueError(form)
        place = hf_hub_url(file.id, file.path_in_repo, repo_type=file.type, revision=file.revision)
    except ValueError:
        raise WrongRemoteError(f"{source.shown}: is no file of a model or data set; {form}") from None
    return place, get_token()


def _login(host: str, source: Address) -> str | None:
    """Return the header for the host's entry in ~/.netrc, if there is one; a `default` entry does not count."""
    path = Path("~/.netrc").expanduser()
    try:
        entry = netrc().hosts.get(host)
    except FileNotFoundError:
        return None
    except NetrcParseError as error:
        # Other messages of this error quote the file.
        text = error.msg if "permissi" in error.msg else f"line {error.lineno} is no entry"
        text = f"{text}; correct it, or chmod 600 {path}"
        raise WrongRemoteError(f"{source.shown}: {path} cannot be used: {text}") from None
    except OSError as error:
        raise WrongRemoteError(f"{source.shown}: {path} cannot be used: {error.strerror}") from None
    return f"Basic {base64.b64encode(f'{entry[0]}:{entry[2]}'.encode()).decode()}" if entry else None


def _failure(source: Address, error: BaseException) -> BaseException:
    """Return the error to raise for one of a transfer; the libraries of buckets have their own types."""
    import aiohttp

    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return error
    scheme = parts_of(source.url).scheme
    advice = f"check the address, and whether you may read it{_ADVICE.get(scheme, '')}"
    status = _status(error)
    if status is not None:
        text = f"{source.shown}: HTTP status {status}"
        if status in _PASSING_STATUS or 500 <= status < 600:
            return UnreachableError(text)
        return RefusedError(f"{text}; {advice}")
    if isinstance(error, aiohttp.TooManyRedirects):
        return WrongRemoteError(f"{source.shown}: it is redirected without end; {advice}")
    reason = re.sub(r"//[^/\s]*@|\?[^\s'\"]*", lambda found: found[0][:2] if found[0][0] == "/" else "", str(error))
    text = f"{source.shown}: {type(error).__name__}: {reason}"
    if any(kind.__name__ in _NO_LOGIN for kind in type(error).__mro__):
        return WrongRemoteError(f"{text}; set up a login for it on this machine{_ADVICE.get(scheme, '')}")
    if isinstance(error, aiohttp.NonHttpUrlClientError):
        return WrongRemoteError(f"{text}; it is redirected to what is no http address; {advice}")
    is_final = isinstance(error, (ValueError, aiohttp.ClientConnectorCertificateError))  # aiohttp.InvalidURL is one
    return WrongRemoteError(text) if is_final else UnreachableError(text)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of aiohttp, fsspec, gcsfs or s3fs; None if it has none."""
    if isinstance(error, TimeoutError):  # Amazon's RequestTimeout has status 400, but passes
        return None
    response = getattr(error.__cause__ or error, "response", None)  # of botocore, whose errors s3fs translates
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # gcsfs
        status = 403
    else:
        known = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), None)
        status = getattr(error, "status" if hasattr(error, "status") else "code", known)  # of aiohttp, of gcsfs
    return int(status) if isinstance(status, int) and status >= 400 else None


def _web_page(path: Path) -> str:
    with open_regular(path) as file:
        head = file.read(60)
    return f"; it is a web page: {head.decode('utf-8', 'replace')!r}" if head.lstrip().startswith(b"<") else ""

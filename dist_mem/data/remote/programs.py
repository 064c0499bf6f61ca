"""The program that reads a URL to its standard output: curl for http(s), hf, ftps, sftp and scp, else a bucket's own.

A program and not a library: a process can be ended whatever it waits for, be it a name server or a handshake, and
aws, gsutil and `pipe:` are read in the same way. Everybody on a machine sees the command lines of its processes, so
curl gets URL and credentials through its standard input, and no other program gets a URL with a password in it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

_CURL = ("curl", "--fail", "--silent", "--show-error", "--no-buffer", "--location", "--globoff", "--config", "-")
_BUCKETS: dict[str, Callable[[str], list[str]]] = {
    "s3": lambda url: ["aws", "s3", "cp", "--only-show-errors", url, "-"],
    "gs": lambda url: ["gsutil", "cat", url],
    "ais": lambda url: ["ais", "get", url, "-"],
}
CURL_SCHEMES = {"http", "https", "ftps", "sftp", "scp"}
_HUB = "hf"
_KNOWN = ", ".join(sorted({*CURL_SCHEMES, *_BUCKETS, _HUB, "pipe"}))


def start(url: str, *, errors: IO[bytes], patience: float) -> subprocess.Popen[bytes]:
    """A process, in a session of its own, that writes the file at `url` to its standard output.

    Args:
        errors: where it complains.
        patience: seconds without a byte after which curl gives up by itself, if we are killed and cannot end it.

    Raises:
        ValueError: the URL, or ~/.netrc, cannot be used; the message shows nothing that may be secret.
        FileNotFoundError: there is no such program.
    """
    scheme = urlsplit(url).scheme
    settings: list[tuple[str, str]] = []
    if scheme == "pipe":
        command = ["sh", "-c", url.removeprefix("pipe:")]
    elif scheme in _BUCKETS:
        if "@" in urlsplit(url).netloc:
            raise ValueError(f"{scheme}:// takes no user or password; its program has settings of its own for them")
        command = _BUCKETS[scheme](url)
    elif scheme in CURL_SCHEMES or scheme == _HUB:
        command = [*_CURL]
        settings = [*_target(url), ("speed-limit", "1"), ("speed-time", f"{patience:.0f}")]
    else:
        raise ValueError(f"{scheme}: is not among {_KNOWN}; a local directory is given as its path alone")
    # A text in a configuration of curl is quoted as in JSON.
    text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings).encode()
    stdin = subprocess.PIPE if text else None
    process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as file:  # it has ended, and says why
            file.write(text)
    return process


def _target(url: str) -> Iterator[tuple[str, str]]:
    """Settings of curl: the URL, where it may be redirected to, and credentials, which go to the URL's own server."""
    token = None
    if urlsplit(url).scheme == _HUB:
        url, token = _of_hub(url)
    parts = urlsplit(url)
    yield "url", url
    yield "proto-redir", "=https" if parts.scheme == "https" else "=http,https"
    if parts.scheme == "https" and token:
        yield "header", f"Authorization: Bearer {token}"
    elif parts.scheme == "https" and "@" not in parts.netloc and (login := _login(parts.hostname or "")):
        yield "user", login


def _of_hub(url: str) -> tuple[str, str | None]:
    """Address and token of a file on a Hugging Face hub; nothing is asked of the hub."""
    # Imported here: half a second that other addresses need not pay for.
    from huggingface_hub import get_token, hf_hub_url, parse_hf_uri

    form = "write hf://datasets/OWNER/NAME or hf://OWNER/NAME, and after it @REVISION and /FOLDER where needed"
    try:
        file = parse_hf_uri(url)
        if not file.path_in_repo:
            raise ValueError(form)
        place = hf_hub_url(file.id, file.path_in_repo, repo_type=file.type, revision=file.revision)
    except ValueError:
        raise ValueError(f"is no file of a model or data set; {form}") from None
    return place, get_token()


def _login(host: str) -> str | None:
    """USER:PASSWORD of the entry of ~/.netrc that names the host, if there is one; `default` names none.

    Raises:
        ValueError: the file cannot be read, or others can read it.
    """
    path = Path("~/.netrc").expanduser()
    try:
        entry = netrc().hosts.get(host)
    except FileNotFoundError:
        return None
    except NetrcParseError as error:
        # Its other messages quote the file.
        text = error.msg if "permissi" in error.msg else f"line {error.lineno} is no entry"
        raise ValueError(f"{path} cannot be used: {text}; mend it, or chmod 600 {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be used: {error.strerror}") from None
    return f"{entry[0]}:{entry[2]}" if entry else None

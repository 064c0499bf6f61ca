"""Start the program that writes a URL to its standard output: curl for http(s), hf, ftps, sftp, scp, else a bucket's.

Programs are used instead of a library because a process can be killed whatever it waits for, such as a name server or a
handshake, and because aws, gsutil and `pipe:` are read in the same way. Every user of a machine sees the command lines
of its processes, so curl gets URL and credentials through its standard input, and no other program gets a URL with a
password in it.
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
    """Start a process, in a separate session, that writes the file at `url` to its standard output.

    Args:
        errors: its standard error.
        patience: seconds without a byte after which curl ends itself, in case we are killed and cannot end it.

    Raises:
        ValueError: the URL, or ~/.netrc, cannot be used; the message shows no secret.
        FileNotFoundError: the program is not installed.
    """
    scheme = urlsplit(url).scheme
    settings: list[tuple[str, str]] = []
    if scheme == "pipe":
        command = ["sh", "-c", url.removeprefix("pipe:")]
    elif scheme in _BUCKETS:
        if "@" in urlsplit(url).netloc:
            raise ValueError(f"{scheme}:// takes no user or password; configure them in its program")
        command = _BUCKETS[scheme](url)
    elif scheme in CURL_SCHEMES or scheme == _HUB:
        command = [*_CURL]
        settings = [*_target(url), ("speed-limit", "1"), ("speed-time", f"{patience:.0f}")]
    else:
        raise ValueError(f"{scheme}: is not among {_KNOWN}; a local directory is given as its path alone")
    # curl's configuration quotes text as JSON does.
    text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings).encode()
    stdin = subprocess.PIPE if text else None
    process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as file:  # it has ended and reported why
            file.write(text)
    return process


def _target(url: str) -> Iterator[tuple[str, str]]:
    """Yield curl's settings: the URL, the protocols of redirects, and credentials, sent only to the URL's server."""
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
    """Return URL and token of a file on a Hugging Face hub, without a request to the hub."""
    # Imported here because it takes half a second, and other addresses do not need it.
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
    """Return USER:PASSWORD of the host's entry in ~/.netrc, if there is one; a `default` entry does not count.

    Raises:
        ValueError: the file cannot be read, or others can read it.
    """
    path = Path("~/.netrc").expanduser()
    try:
        entry = netrc().hosts.get(host)
    except FileNotFoundError:
        return None
    except NetrcParseError as error:
        # Other messages of this error quote the file.
        text = error.msg if "permissi" in error.msg else f"line {error.lineno} is no entry"
        raise ValueError(f"{path} cannot be used: {text}; correct it, or chmod 600 {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be used: {error.strerror}") from None
    return f"{entry[0]}:{entry[2]}" if entry else None

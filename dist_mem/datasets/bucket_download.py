"""List and download files of a public Google Cloud Storage bucket over HTTP; a stopped download can be resumed.

    https://storage.googleapis.com/storage/v1/b/<bucket>/o?prefix=...     listing, in pages, with sizes and MD5
    https://storage.googleapis.com/<bucket>/<name>                        content

Any server with these two URLs can replace it: a mirror, or the server of a test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dist_mem.data.remote import fetch as remote
from dist_mem.data.remote.fetch import METADATA_BYTES, Verify
from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.files import read_regular, write_bytes
from dist_mem.runtime.names import PLAIN, is_plain_path
from dist_mem.runtime.progress import Progress


class DownloadError(UnfitError):
    """A file could not be fetched completely."""


class RemoteFile(NamedTuple):
    name: str  # in the bucket, "train/98.txt"
    num_bytes: int
    md5: str | None  # base64, as listed; None: of a file that was joined of parts
    updated: float = 0.0  # time of the last change, in seconds


def list_files(base_url: str, prefix: str) -> list[RemoteFile]:
    """List the files of the bucket at `base_url` (https://host/bucket) whose names start with `prefix`.

    Raises:
        DownloadError: the bucket cannot be listed now.
        UnusableError: there is no bucket, or it refuses.
    """
    parts = urllib.parse.urlsplit(base_url.rstrip("/"))
    root, _, bucket = parts.path.rpartition("/")
    files: list[RemoteFile] = []
    query = {"prefix": prefix, "fields": "items(name,size,md5Hash,updated),nextPageToken"}
    while True:
        path = f"{root}/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
        url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        answer = fetch(url)
        try:
            page = json.loads(answer)
            files.extend(
                RemoteFile(item["name"], int(item["size"]), item.get("md5Hash"), _seconds(item.get("updated")))
                for item in page.get("items", [])
            )
        except (ValueError, KeyError) as error:
            raise UnusableError(
                f"{url} does not answer with a bucket's listing ({error!r}): check the base URL"
            ) from error
        if "nextPageToken" not in page:
            return files
        query["pageToken"] = page["nextPageToken"]


def download_files(base_url: str, files: Sequence[RemoteFile], directory: Path, *, workers: int = 8) -> None:
    """Fetch files into `directory`, keeping those already complete; each file appears only when it is complete.

    Raises:
        DownloadError: a file could not be fetched; finished files are kept, and the next call continues from there. Or
            the bucket lists a name outside `directory`.
        WrongRemoteError: a file does not exist, may not be read, or is longer than listed; likewise.
    """
    for file in files:
        if not is_plain_path(file.name):
            raise DownloadError(f"{base_url} lists the file {file.name!a}: its parts must each be {PLAIN}")
    missing = [file for file in files if not is_complete(directory / file.name, file)]
    if len(missing) < len(files):
        print(f"{len(files) - len(missing)} of {len(files)} files are there already", flush=True)
    total = sum(file.num_bytes for file in missing)
    with (
        Progress(total, "download", unit="bytes") as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        futures = [pool.submit(_download_file, base_url, file, directory) for file in missing]
        try:
            for future in as_completed(futures):
                progress.add(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def is_complete(path: Path, file: RemoteFile) -> bool:
    """Return whether the local file has the listed size and MD5; without an MD5, whether it is newer than that one."""
    if not path.exists() or path.stat().st_size != file.num_bytes:
        return False
    return path.stat().st_mtime > file.updated if file.md5 is None else _md5(read_regular(path)) == file.md5


def fetch(url: str, *, limit: int = METADATA_BYTES, verify: Verify = lambda _: None) -> bytes:
    """Return the content at a URL, at most `limit` bytes; retry after failures that may be temporary.

    Raises:
        DownloadError: it could not be fetched now.
        WrongRemoteError: it does not exist, may not be read, is longer, or `verify` refuses it.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "content"
        try:
            remote.download(remote.Address(url, remote.show(url)), path, limit=limit, verify=verify)
        except remote.WrongRemoteError:
            raise
        except remote.RemoteError as error:
            raise DownloadError(f"{error}; start the same command again to go on: finished files are kept") from error
        return read_regular(path)


def _download_file(base_url: str, file: RemoteFile, directory: Path) -> int:
    url = f"{base_url.rstrip('/')}/{urllib.parse.quote(file.name)}"
    content = fetch(url, limit=file.num_bytes)
    if len(content) != file.num_bytes or (file.md5 is not None and _md5(content) != file.md5):
        raise DownloadError(
            f"{url}: {len(content)} bytes with MD5 {_md5(content)} arrived, the bucket lists {file.num_bytes} "
            f"with {file.md5}; start the same command again"
        )
    path = directory / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return file.num_bytes


def _seconds(time: str | None) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()

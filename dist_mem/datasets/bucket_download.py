"""List and download files of a public Google Cloud Storage bucket; a stopped download can be resumed.

    https://storage.googleapis.com/storage/v1/b/<bucket>/o?prefix=...     listing, in pages, with sizes and MD5
    https://storage.googleapis.com/<bucket>/<name>                        content

Any server with these two URLs can replace it. gcsfs cannot list such a mirror: it first asks the server by gRPC.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dist_mem.data.remote.fetch import METADATA_BYTES, Address, WrongRemoteError, download, show
from dist_mem.errors import UnusableError
from dist_mem.runtime.file_schema import read_json
from dist_mem.runtime.files import read_regular
from dist_mem.runtime.names import PLAIN, is_plain_path
from dist_mem.runtime.progress import Progress

SOURCE_KEY = "--source"  # the option of builders that gives the folder, for messages


class RemoteFile(NamedTuple):
    name: str  # in the bucket, "train/98.txt"
    num_bytes: int
    md5: str | None  # base64, as listed; None: of a file that was joined of parts
    updated: float = 0.0  # time of the last change, in seconds


def list_files(base_url: str, prefix: str) -> list[RemoteFile]:
    """List the files of the bucket at `base_url` (https://host/bucket) whose names start with `prefix`.

    Raises:
        RemoteError: the bucket cannot be listed now, there is none, or it refuses.
    """
    server, _, bucket = base_url.rstrip("/").rpartition("/")
    files: list[RemoteFile] = []
    query = {"prefix": prefix, "fields": "items(name,size,md5Hash,updated),nextPageToken"}
    while True:
        page, found = _page(f"{server}/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}")
        files += found
        if "nextPageToken" not in page:
            return files
        query["pageToken"] = page["nextPageToken"]


def _page(url: str) -> tuple[dict[str, Any], list[RemoteFile]]:
    """Return a page of a listing, and its files."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.json"
        download(Address(url, show(url)), path, limit=METADATA_BYTES, verify=lambda _: None, key="TMPDIR")
        try:
            page = read_json(path, UnusableError)
            return page, [
                RemoteFile(item["name"], int(item["size"]), item.get("md5Hash"), _seconds(item.get("updated")))
                for item in page.get("items", [])
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # what JSON there is may be of any kind
            raise WrongRemoteError(
                f"{show(url)} does not answer with a bucket's listing ({error!r}): check the base URL"
            ) from error


def download_files(base_url: str, files: Sequence[RemoteFile], directory: Path, *, workers: int = 8) -> None:
    """Fetch files into `directory`, keeping those already complete; each file appears only when it is complete.

    Raises:
        RemoteError: a file could not be fetched, or is not what is listed; finished files are kept, and the next call
            continues from there. Or the bucket lists a name outside `directory`.
    """
    for file in files:
        if not is_plain_path(file.name):
            raise WrongRemoteError(f"{show(base_url)} lists the file {file.name!a}: its parts must each be {PLAIN}")
    missing = [file for file in files if not is_complete(directory / file.name, file)]
    if len(missing) < len(files):
        print(f"{len(files) - len(missing)} of {len(files)} files are there already", flush=True)
    with (
        Progress(sum(file.num_bytes for file in missing), "download", unit="bytes") as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        closed = threading.Event()
        futures = [pool.submit(_download_file, base_url, file, directory, closed) for file in missing]
        try:
            for future in as_completed(futures):
                progress.add(future.result())
        except BaseException:
            closed.set()
            pool.shutdown(cancel_futures=True)
            raise


def is_complete(path: Path, file: RemoteFile) -> bool:
    """Return whether the local file has the listed size and MD5; without an MD5, whether it is newer than that one."""
    if not path.exists() or path.stat().st_size != file.num_bytes:
        return False
    return path.stat().st_mtime > file.updated if file.md5 is None else _md5(path) == file.md5


def _download_file(base_url: str, file: RemoteFile, directory: Path, closed: threading.Event) -> int:
    url = f"{base_url.rstrip('/')}/{urllib.parse.quote(file.name)}"
    verify, place = partial(_verify, file), directory / file.name
    download(Address(url, show(url)), place, limit=file.num_bytes, verify=verify, cancelled=closed, key=SOURCE_KEY)
    return file.num_bytes


def _verify(file: RemoteFile, path: Path) -> None:
    """Raise ValueError if a file is not the listed one."""
    listed = f"the bucket lists {file.num_bytes} with {file.md5}"
    if path.stat().st_size != file.num_bytes or (file.md5 is not None and _md5(path) != file.md5):
        raise ValueError(f"{path}: {path.stat().st_size} bytes with MD5 {_md5(path)} arrived, {listed}")


def _seconds(time: str | None) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def _md5(path: Path) -> str:
    return base64.b64encode(hashlib.md5(read_regular(path), usedforsecurity=False).digest()).decode()

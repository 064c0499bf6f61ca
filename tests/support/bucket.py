"""A fake of a public Google Cloud Storage bucket, for the tests of the download."""

import base64
import hashlib
import json
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.file_server import FileServer, QuietHandler

LISTING = "/storage/v1/b/books/o"


class Bucket(FileServer):
    """Serves a bucket "books" on the loopback: its listing, in pages of two, and its files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.RequestHandlerClass = BucketHandler
        self.failures: dict[str, list[int]] = {}  # path -> HTTP statuses of the first responses
        self.altered: dict[str, bytes] = {}  # path -> content that differs from the listing
        self.silent: set[str] = set()  # paths without an answer
        self.has_md5 = True
        self.url += "/books"


class BucketHandler(QuietHandler):
    server: Bucket

    def do_GET(self) -> None:  # noqa: N802
        parts = urllib.parse.urlsplit(self.path)
        self.server.asked[parts.path] += 1
        if parts.path in self.server.silent:
            self.server.released.wait()
        elif self.server.failures.get(parts.path):
            self.answer(self.server.failures[parts.path].pop(0), b"")
        elif parts.path in self.server.altered:
            self.answer(200, self.server.altered[parts.path])
        elif parts.path == LISTING:
            self.answer(200, json.dumps(self.listing(dict(urllib.parse.parse_qsl(parts.query)))).encode())
        elif (path := self.server.root / parts.path.removeprefix("/books/")).is_file():
            self.answer(200, path.read_bytes())
        else:
            self.answer(404, b"")

    def listing(self, query: dict[str, str]) -> dict[str, Any]:
        names = sorted(
            str(path.relative_to(self.server.root)) for path in self.server.root.rglob("*") if path.is_file()
        )
        names = [name for name in names if name.startswith(query["prefix"])]
        start = int(query.get("pageToken", "0"))
        page: dict[str, Any] = {"items": [self.item(name) for name in names[start : start + 2]]}
        if start + 2 < len(names):
            page["nextPageToken"] = str(start + 2)
        return page

    def item(self, name: str) -> dict[str, str]:
        path = self.server.root / name
        md5 = base64.b64encode(hashlib.md5(path.read_bytes()).digest()).decode()
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat().replace("+00:00", "Z")
        size = str(path.stat().st_size)
        return {"name": name, "size": size, "updated": changed, **({"md5Hash": md5} if self.server.has_md5 else {})}

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

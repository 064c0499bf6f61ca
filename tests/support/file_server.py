"""A file server on the loopback that fails on demand, for the tests of remote data."""

import json
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dist_mem.config import DataConfig
from dist_mem.data.directory import open_index, refresh
from dist_mem.data.remote import fetch as remote
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from tests.support.lane_corpus import make_split

SHARD = "train/tiny-train-00000.tar"  # of `served_split`
ENDLESS_BYTES = 2**28  # limit of `endless` bodies: a client that has not hung up by then never will
PAGE = b"<!DOCTYPE html><html><body>Please log in.</body></html>"


class QuietHandler(BaseHTTPRequestHandler):
    """Prints nothing: the output of tests is for failures, and that of a command is what the test reads."""

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has hung up, as it may
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


class FileServer(ThreadingHTTPServer):
    """Serves the files under `root`, with the faults in `faults`.

    A fault is an HTTP status, or `silent` (nothing is sent), `stalled` (half of the body, then nothing), `dripping`
    (half of it, then a byte now and then), `cut` (half of it, then the end), `short` (as `cut`, without a
    Content-Length), `page` (a web page), `slow`, `endless` (the body, and more until the client hangs up), or a URL, to
    which the client is redirected.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Path, *, certificate: Path | None = None) -> None:
        """Listen on a free port; use https if there is a certificate (with its key)."""
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.root = root
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.asked: Counter[str] = Counter()  # path -> number of requests
        self.credentials: set[str | None] = set()  # the Authorization headers received
        self.num_sent = 0  # bytes of `endless` bodies sent
        self.faults: defaultdict[str, list[int | str]] = defaultdict(
            list
        )  # path -> faults of the next requests; the last one repeats
        self.stalls = threading.Event()  # set when a request hangs
        self.released = threading.Event()  # set to release hanging requests
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Stop the server and refuse further connections."""
        self.released.set()
        self.shutdown()
        self.server_close()


class FileHandler(QuietHandler):
    server: FileServer

    def do_GET(self) -> None:
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        self.server.asked[name] += 1
        self.server.credentials.add(self.headers.get("Authorization"))
        faults = self.server.faults[name]
        fault = (faults.pop(0) if len(faults) > 1 else faults[0]) if faults else "none"
        file = self.server.root / name
        if isinstance(fault, int) or not file.is_file():
            self.send_error(fault if isinstance(fault, int) else 404)
        elif "://" in fault:
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
        elif fault == "silent":
            self.hang()
        else:
            self.answer(PAGE if fault == "page" else file.read_bytes(), fault)

    do_POST = do_GET  # noqa: N815

    def answer(self, body: bytes, fault: str) -> None:
        half = len(body) // 2
        self.send_response(200)
        if fault not in ("short", "endless"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:half])
        self.wfile.flush()
        if fault == "slow":
            self.server.released.wait(0.2)
        if fault == "stalled":
            self.hang()
        if fault == "dripping":
            while not self.server.released.wait(0.05):
                self.wfile.write(b" ")
        if fault not in ("cut", "short", "stalled"):
            self.wfile.write(body[half:])
        if fault == "endless":
            with suppress(OSError):
                while self.server.num_sent < ENDLESS_BYTES:
                    self.server.num_sent += self.wfile.write(bytes(2**16))

    def hang(self) -> None:
        self.server.stalls.set()
        self.server.released.wait(600)


@contextmanager
def served_split(root: Path) -> Iterator[FileServer]:
    """Serve the corpus of lane_corpus.py in small tars, with a tokenizer."""
    tokenizer = BytesTokenizer()
    save_tokenizer(tokenizer, root)
    make_split(root / "train", with_extras=True, max_shard_bytes=60, tokenizer_fingerprint=tokenizer.fingerprint)
    server = FileServer(root)
    yield server
    server.close()


def opened(data: DataConfig) -> Index:
    """Open the training split as a job does."""
    refresh(data, ["train"])
    return open_index(data, "train")


def start_fetch(data: DataConfig, first: str = "") -> subprocess.Popen[str]:
    """Start a process that fetches the training split; `first`: statements that it executes before."""
    code = first + (
        "import json, sys; from dist_mem.config import DataConfig; from dist_mem.data.directory import open_index;"
        "from dist_mem.data.shard import fetch_shards;"
        "fetch_shards(open_index(DataConfig(**json.loads(sys.argv[1])), 'train'))"
    )
    keys = {key: getattr(data, key) for key in ("path", "cache", "stage", "stage_dir")}
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(keys)], stderr=subprocess.PIPE, text=True)


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limits of downloads in this process, and allow three attempts."""
    monkeypatch.setattr(remote, "STALL_SECONDS", 20.0)  # tests of stalls set less
    monkeypatch.setattr(remote, "RETRY_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.02)

"""Servers between a job and MLflow: a gateway that requires tokens or client certificates, and a proxy."""

from __future__ import annotations

import base64
import http.client
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Gateway(ThreadingHTTPServer):
    """HTTPS gateway to an HTTPS server: forwards requests with one of `tokens` as one user; answers 401 to others."""

    daemon_threads = True

    def __init__(self, backend: str, folder: Path, *, user: str, password: str, asks_certificate: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _GatewayHandler)
        self.uri = f"https://127.0.0.1:{self.server_address[1]}"
        self.tokens: set[str] = set()
        self.backend = urlsplit(backend).netloc
        self.login = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        self.trust = ssl.create_default_context(cafile=folder / "ca.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        if asks_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(folder / "ca.pem")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Read until the client hangs up, so that a client whose certificate is refused can read the reason."""
        with suppress(OSError), socket.socket(fileno=request.detach()) as plain:
            plain.settimeout(5)
            while plain.recv(65536):
                continue


class _GatewayHandler(BaseHTTPRequestHandler):
    server: Gateway

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.server.tokens:
            self._answer(401, "text/plain", b"no such token")
            return
        backend = http.client.HTTPSConnection(self.server.backend, context=self.server.trust)
        headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
        backend.request(self.command, self.path, body, {**headers, "Authorization": self.server.login})
        answer = backend.getresponse()
        self._answer(answer.status, answer.getheader("Content-Type", "text/plain"), answer.read())
        backend.close()

    do_GET = do_POST = do_PATCH = do_PUT = _hand_on  # noqa: N815

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that records the targets of its clients, and forwards only to `allowed`."""

    daemon_threads = True

    def __init__(self, allowed: str) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"
        self.allowed = urlsplit(allowed).netloc
        self.asked: list[str] = []


class _ProxyHandler(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += self.request.recv(65536) or b"\r\n\r\n"
        target = request.split(b" ")[1].decode()
        self.server.asked.append(target)
        if not request.startswith(b"CONNECT ") or target != self.server.allowed:
            self.request.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        host, port = target.split(":")
        with socket.create_connection((host, int(port))) as other:
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ends = {self.request: other, other: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    if not (data := end.recv(65536)):
                        return
                    ends[end].sendall(data)


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Run the server in a thread within the context."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

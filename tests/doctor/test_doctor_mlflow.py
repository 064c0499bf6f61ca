"""The doctor's look for MLflow's server asks that server alone, and sends it no secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dist_mem.doctor.mlflow_server import _answers


@contextmanager
def server(status: int, *headers: tuple[str, str]) -> Iterator[tuple[int, list[str]]]:
    """Its port, and the requests it has got, with their headers."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.path}\n{self.headers}")
            self.send_response(status)
            for header in headers:
                self.send_header(*header)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield listening.server_port, requests
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    with server(200) as (other, at_other), server(302, ("Location", f"http://127.0.0.1:{other}/health")) as (port, _):
        assert _answers(f"http://127.0.0.1:{port}")
    assert at_other == []


def test_a_server_whose_address_has_credentials_answers_and_gets_none_of_them() -> None:
    with server(200) as (port, requests):
        assert _answers(f"http://ada:hunter2@127.0.0.1:{port}")
    assert len(requests) == 1
    assert "ada" not in requests[0] and "Authorization" not in requests[0]

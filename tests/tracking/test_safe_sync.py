"""`track sync` uploads what lies in the run, to the server that its user named, and nothing else to nobody else."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import save_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, new_uid, write_log
from dist_mem.tracking.mlflow.sync import log_to_run
from tests.support.messages import said
from tests.support.tracked import config_for, track_sync

SECRET = "the user's secret"
TOKEN = "the-users-token"


class Thief(ThreadingHTTPServer):
    """A server that keeps the header of every request, and answers it with a status alone."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.taken: list[str] = []
        self.status = status
        self.uri = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Taker(BaseHTTPRequestHandler):
    server: Thief

    def do_GET(self) -> None:
        self.server.taken.append(str(self.headers))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Say nothing: the output of tests is for failures."""


@contextmanager
def answering(status: int) -> Iterator[Thief]:
    server = Thief(status)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def thief(monkeypatch: pytest.MonkeyPatch) -> Iterator[Thief]:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with answering(404) as server:
        yield server


def make_run(run_dir: Path, uri: str, *entries: tuple[str, dict[str, Any]], experiment: str = "dist_mem") -> Path:
    """A run directory of somebody else."""
    run_dir.mkdir()
    save_config(config_for(uri), run_dir / "config.yaml")
    header = Header(new_uid(), "theirs", {"name": experiment})
    write_log(run_dir / METRICS_FILE, header, [Entry(kind, 1764000000000, body) for kind, body in entries])
    return run_dir


POINT = ("point", {"step": 1, "metrics": {"loss": 1.0}})


def test_a_server_that_only_the_folder_names_gets_nothing(
    tmp_path: Path, thief: Thief, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", thief.uri, POINT)
    assert track_sync([run_dir]) == EXIT_USAGE
    printed = capsys.readouterr().err
    assert f"tracking.uri={thief.uri}" in printed and "only" in printed
    complaint = log_to_run(
        config_for(thief.uri).tracking, run_dir=run_dir, step=1, metrics={"nll": 1.0}, files=[], overrides=[]
    )
    assert f"dist-mem track sync {run_dir} tracking.uri={thief.uri}" in (complaint or "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another.example")
    assert track_sync([run_dir]) == EXIT_USAGE
    assert thief.taken == []
    track_sync([run_dir], [f"tracking.uri={thief.uri}"])
    assert any(TOKEN in headers for headers in thief.taken), "named on the command line, it is asked"


@pytest.mark.parametrize("how", ["command line", "environment", "yaml"])
def test_a_server_can_be_named_in_every_way_the_user_has(
    tmp_path: Path, thief: Thief, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run_dir = make_run(tmp_path / "run", thief.uri, POINT)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"train: {{steps: 7}}\ntracking: {{uri: '{thief.uri}'}}\n")
    if how == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", thief.uri)
    given = {"command line": [f"tracking.uri={thief.uri}"], "yaml": [str(mine)], "environment": []}[how]
    main(["track", "sync", str(run_dir), *given])
    assert thief.taken


def test_no_other_kind_of_server_is_taken_from_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for uri in ("databricks", "postgresql://evil.example/x", "http:evil.example", "uc://x", "s3://x/y"):
        assert track_sync([make_run(tmp_path / uri[:4], uri, POINT)]) == EXIT_USAGE
        said(capsys.readouterr().err, f"tracking.uri={uri}")


def test_a_local_store_of_the_folder_sends_no_files_to_a_server(
    tmp_path: Path, thief: Thief, sqlite_uri: str, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client.create_experiment("stolen", artifact_location=f"{thief.uri}/files")
    run_dir = make_run(
        tmp_path / "run", sqlite_uri, POINT, ("text", {"text": "text", "name": "a.txt"}), experiment="stolen"
    )
    assert track_sync([run_dir]) == EXIT_USAGE
    assert "keeps its files at" in capsys.readouterr().err
    assert thief.taken == []


def test_only_files_inside_the_run_are_uploaded(
    tmp_path: Path, sqlite_uri: str, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    paths: list[Any] = ["link.txt", "folder/secret.txt", "../home/secret.txt", "a/../../home/secret.txt"]
    paths += [str(outside / "secret.txt"), "whole", "folder", "missing.txt", "", ".", "own.txt", "inner.txt", 7]
    run_dir = make_run(tmp_path / "run", sqlite_uri, *[("artifact", {"path": path}) for path in paths])
    (run_dir / "link.txt").symlink_to(outside / "secret.txt")
    (run_dir / "folder").symlink_to(outside)
    (run_dir / "whole").mkdir()
    (run_dir / "whole" / "link.txt").symlink_to(outside / "secret.txt")
    (run_dir / "own.txt").write_text("own")
    (run_dir / "inner.txt").symlink_to(run_dir / "own.txt")
    assert track_sync([run_dir]) == EXIT_DONE
    printed = capsys.readouterr().out
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    assert sorted(found.path for found in client.list_artifacts(run_id)) == ["inner.txt", "own.txt"]
    assert printed.count("is no file inside the run directory") == len(paths) - 2
    stored = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    assert not any(SECRET in path.read_text() for path in stored.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["../../x.txt", "/tmp/x.txt", "..", "", "a/../../b", 3])
def test_a_text_is_kept_under_a_plain_name(
    tmp_path: Path, sqlite_uri: str, client: Any, capsys: pytest.CaptureFixture[str], name: Any
) -> None:
    run_dir = make_run(tmp_path / "run", sqlite_uri, ("text", {"text": "text", "name": name}))
    before = {path for path, _, _ in os.walk(tmp_path)}
    assert track_sync([run_dir]) == EXIT_DONE
    assert "is no plain name" in capsys.readouterr().out
    assert not client.list_artifacts((run_dir / "mlflow_run_id").read_text().strip())
    assert json.dumps(sorted({path for path, _, _ in os.walk(tmp_path)} - before)).count("x.txt") == 0

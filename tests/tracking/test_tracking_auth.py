"""A real MLflow server with users, behind TLS with a CA of its own: who is let in, and where no secret ends."""

import base64
import json
import secrets
import select
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from mlflow.exceptions import MlflowException
from requests import HTTPError

from dist_mem.config import ConfigError, load_config, save_config
from dist_mem.config.text_checks import check_credentials
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.runtime.environment import mlflow_credentials_set
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.tracking.mlflow import sender, store
from dist_mem.tracking.mlflow.client import connect, first_line
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, check_tracking
from tests.support.certificates import write_certificates
from tests.support.file_server import FileServer
from tests.support.jobs import finish, start_ranks, write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import refused
from tests.support.mlflow_server import MlflowServer, points_of
from tests.support.tracked import config_for, history, job, start, steps, track_sync


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that records the targets of its clients, and forwards only to `allowed`."""

    daemon_threads = True

    def __init__(self, allowed: str) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"
        self.allowed = urlsplit(allowed).netloc
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


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


pytestmark = pytest.mark.servers

ADMIN, ADMIN_PASSWORD = "root-of-mlflow", secrets.token_hex(12)
USER, PASSWORD = "ada-lovelace-1815", secrets.token_hex(12)
READER, READER_PASSWORD = "a-reader", secrets.token_hex(12)
_VARIABLES = ("TOKEN", "USERNAME", "PASSWORD", "SERVER_CERT_PATH", "CLIENT_CERT_PATH", "INSECURE_TLS")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Users: an administrator, USER, and READER, who may only look at what others have made."""
    pytest.importorskip("flask_wtf", reason="the users of an MLflow server need Flask-WTF: pip install 'mlflow[auth]'")
    folder = tmp_path_factory.mktemp("server")
    write_certificates(folder)
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/auth.db\nadmin_username = {ADMIN}\n"
        f"admin_password = {ADMIN_PASSWORD}\nauth_cache_ttl_seconds = 600\nauth_cache_max_size = 100\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    server = MlflowServer(
        folder,
        options=["--app-name", "basic-auth", "--uvicorn-opts", f"--ssl-certfile {folder}/server.pem"],
        environment={"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "x"},
        trust=ssl.create_default_context(cafile=folder / "ca.pem"),
    )
    server.start()
    ask(server, "POST", "users/create", username=USER, password=PASSWORD)
    ask(server, "POST", "users/create", username=READER, password=READER_PASSWORD)
    yield server
    server.close()


def ask(server: MlflowServer, method: str, endpoint: str, **content: str) -> None:
    """What an administrator asks of the server."""
    login = base64.b64encode(f"{ADMIN}:{ADMIN_PASSWORD}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    request = Request(f"{server.uri}/api/2.0/mlflow/{endpoint}", json.dumps(content).encode(), headers, method=method)
    trust = ssl.create_default_context(cafile=server.folder / "ca.pem")
    with urlopen(request, context=trust, timeout=limit(30)) as answer:
        assert answer.status == 200


@pytest.fixture
def environment(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user who trusts the CA and has logged in with nothing yet."""
    for name in _VARIABLES:
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(server.folder / "ca.pem"))
    return monkeypatch


def log_in(environment: pytest.MonkeyPatch, user: str = USER, password: str = PASSWORD) -> None:
    environment.setenv("MLFLOW_TRACKING_USERNAME", user)
    environment.setenv("MLFLOW_TRACKING_PASSWORD", password)


# Who is let in


def test_credentials_may_be_in_a_file(server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the environment they are in the tests that follow; a token: test_sync.py."""
    environment.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".mlflow").mkdir(parents=True)
    text = f"[mlflow]\nmlflow_tracking_username = {USER}\nmlflow_tracking_password = {PASSWORD}\n"
    (tmp_path / "home" / ".mlflow" / "credentials").write_text(text)
    config = config_for(server.uri)
    check_tracking(config.tracking, tmp_path / "run")
    tracker = job(config, tmp_path / "run", steps(1, 3))
    assert history(connect(server.uri), tracker.run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_refused_user_is_shown_what_to_set(
    server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HOME", str(tmp_path / "home"))
    config = config_for(server.uri)
    assert mlflow_credentials_set() == []
    with refused(UnusableError, "401: it requires credentials"):
        check_tracking(config.tracking, tmp_path)
    log_in(environment, password="wrong")
    with refused(UnusableError, "401: it refuses MLFLOW_TRACKING_USERNAME"):
        check_tracking(config.tracking, tmp_path)
    log_in(environment)
    check_tracking(config.tracking, tmp_path)
    job(config, tmp_path, steps(1, 1))  # makes the experiment, and a run
    log_in(environment, READER, READER_PASSWORD)
    for run_dir in (tmp_path, tmp_path / "a new one"):
        with refused(UnusableError, "403", "EDIT"):
            check_tracking(config.tracking, run_dir)
    check_tracking(config_for(server.uri, tracking={"experiment": "one of his own"}).tracking, tmp_path / "a new one")


def test_every_refused_request_says_what_to_set(
    server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of files too, whose errors come from another library: a password may change between points and files."""
    log_in(environment)
    client: Any = connect(server.uri)
    run_id = job(config_for(server.uri), tmp_path, steps(1, 1)).run_id
    client.log_text(run_id, "a text", "before.txt")  # looks the run up; later files are sent without a request for it
    for user, password, reason in [(USER, "wrong", "401: it refuses"), (READER, READER_PASSWORD, "403: the user is")]:
        log_in(environment, user, password)
        for send in (
            partial(client.log_metric, run_id, "loss", 1.0),
            partial(client.set_tag, run_id, "name", "value"),
            partial(client.set_terminated, run_id),
            partial(client.log_text, run_id, "a text", "after.txt"),
        ):
            with pytest.raises((MlflowException, HTTPError)) as caught:
                send()
            assert first_line(caught.value).startswith(reason), send


def test_a_run_of_another_log_is_refused_before_it_is_trained(
    server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And it takes nothing later; a run that is deleted is nobody's."""
    log_in(environment)
    config = config_for(server.uri)
    theirs = str(job(config, tmp_path / "theirs", steps(1, 2)).run_id)
    job(config_for(server.uri, tracking={"send": "never"}), tmp_path / "mine", steps(1, 3))
    (tmp_path / "mine" / RUN_ID_FILE).write_text(theirs)
    with refused(UnusableError, theirs, tmp_path / "mine" / RUN_ID_FILE):
        check_tracking(config.tracking, tmp_path / "mine")
    save_config(config, tmp_path / "mine" / "config.yaml")
    assert track_sync([tmp_path / "mine"], [f"tracking.uri={server.uri}"]) == EXIT_USAGE
    client = connect(server.uri)
    assert history(client, theirs, "loss") == [(1, 1.0), (2, 2.0)]
    client.delete_run(theirs)
    assert check_tracking(config.tracking, tmp_path / "mine") is None


def test_a_certificate_of_an_unknown_authority_is_refused_with_what_to_set(
    server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log_in(environment)
    environment.delenv("MLFLOW_TRACKING_SERVER_CERT_PATH")
    with refused(UnusableError, "certificate is not trusted", "MLFLOW_TRACKING_SERVER_CERT_PATH"):
        check_tracking(config_for(server.uri).tracking, tmp_path)
    environment.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "/nowhere.pem")
    with refused(UnusableError, "nowhere.pem"):
        check_tracking(config_for(server.uri).tracking, tmp_path)
    environment.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    with refused(UnusableError, "MLFLOW_TRACKING_INSECURE_TLS", "both set"):
        check_tracking(config_for(server.uri).tracking, tmp_path)


class Strict(FileServer):
    """It wants a certificate of its clients."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Read until the client hangs up, so that a client whose certificate is refused can read the reason."""
        with suppress(OSError), socket.socket(fileno=request.detach()) as plain:
            plain.settimeout(5)
            while plain.recv(65536):
                continue


def test_a_server_that_asks_for_a_certificate_gets_the_users(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_certificates(tmp_path)
    environment.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "ca.pem"))
    environment.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    environment.setattr(store, "SECONDS", limit(20))
    with closing(Strict(tmp_path, certificate=tmp_path / "server.pem")) as strict:
        strict.faults.default_factory = lambda: [503]
        context: ssl.SSLContext = strict.socket.context  # type: ignore[attr-defined] # it is an SSLSocket
        context.load_verify_locations(tmp_path / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        with refused(UnusableError, "MLFLOW_TRACKING_CLIENT_CERT_PATH"):
            check_tracking(config_for(strict.url).tracking, tmp_path)
        assert not strict.asked
        environment.setenv("MLFLOW_TRACKING_CLIENT_CERT_PATH", str(tmp_path / "client.pem"))
        assert "503" in str(check_tracking(config_for(strict.url).tracking, tmp_path))
        assert strict.asked
        strict.asked.clear()  # points have another client than the check
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        job(config_for(strict.url), run_dir, steps(1, 1))
        assert strict.asked


# Let in, and out again


def test_a_password_that_is_changed_in_mid_run_costs_no_points(
    server: MlflowServer, environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message; the job continues and ends normally, and a sync with the new password sends the rest once."""
    environment.setattr(sender, "FLUSH_SECONDS", limit(60))  # on a loaded machine the server answers late
    ask(server, "POST", "users/create", username="grace", password="the-old-password")
    log_in(environment, "grace", "the-old-password")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    tracking = {"uri": server.uri, "experiment": "of grace"}
    (run_dir / "config.yaml").write_text(json.dumps({"tracking": tracking}))
    tracker = start(config_for(server.uri, tracking=tracking), run_dir)
    tracker.log(1, {"loss": 1.0})
    wait_until(lambda: tracker.run_id is not None, "the run")
    ask(server, "PATCH", "users/update-password", username="grace", password="the-new-password")
    for step, loss in steps(2, 5).items():
        tracker.log(step, {"loss": loss})
    tracker.close("FINISHED")
    printed = capsys.readouterr().err
    assert printed.count("401: it refuses MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; set") == 1
    assert printed.count(f"dist-mem track sync {run_dir}") == 1
    named = [f"tracking.uri={server.uri}"]
    assert track_sync([run_dir], named) == EXIT_USAGE
    log_in(environment, "grace", "the-new-password")
    assert [track_sync([run_dir], named) for _ in range(2)] == [EXIT_DONE, EXIT_DONE]
    client: Any = connect(server.uri)
    assert history(client, tracker.run_id, "loss") == list(steps(1, 5).items())
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    printed += "".join(capsys.readouterr())
    assert "the-old-password" not in printed and "the-new-password" not in printed


# Where secrets end


def test_a_job_leaves_no_secret_anywhere_and_asks_nobody_but_the_server(
    server: MlflowServer, environment: pytest.MonkeyPatch, books: Path, tmp_path: Path
) -> None:
    """Through a proxy, which is asked for the server alone: MLflow sends no usage figures home."""
    log_in(environment)
    environment.delenv("PYTEST_CURRENT_TEST")  # MLflow has no telemetry where it is set
    changes = {"tracking": {"mlflow": True, "uri": server.uri}, "train": {"steps": 4}}
    config = write_config(tmp_path / "job.yaml", books, tmp_path / "run", changes)
    with closing(Proxy(server.uri)) as proxy:
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
            environment.setenv(name, proxy.uri.replace("//", "//proxy-user:proxy-password@"))
        processes = start_ranks(["train", str(config)], world_size=1, cwd=tmp_path)
        arguments = set()
        while processes[0].poll() is None:
            arguments |= command_lines()
            time.sleep(0.05)
        codes, text = finish(processes)
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
            environment.delenv(name)
    assert codes == [EXIT_DONE], text
    assert proxy.asked and set(proxy.asked) == {server.uri.removeprefix("https://")}
    run_dir = tmp_path / "run"
    client = connect(server.uri)
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert client.get_run(run_id).info.status == "FINISHED"
    assert {step for name, step, _, _ in points_of(client, run_id) if name == "train/loss"} == {1, 2, 3, 4}
    assert [point.step for point in read_points(run_dir / METRICS_FILE)] == [1, 2, 3, 4]
    of_server = [server.folder / "mlflow.db", *files_in(server.folder / "artifacts")]
    written = {str(path): path.read_bytes() for path in [*files_in(run_dir), config, *of_server]}
    assert any("manifest.json" in path for path in written) and any("metrics.jsonl" in path for path in written)
    written |= {"output": text.encode(), "argv": b" ".join(arguments)}
    written["log of the server"] = (server.folder / "log").read_bytes()
    for secret in (PASSWORD, USER, "proxy-password", "proxy-user"):
        assert [where for where, content in written.items() if secret.encode() in content] == []


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def command_lines() -> set[bytes]:
    """What `ps` shows of every process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes())
        except OSError:  # it has just ended
            continue
    return found


def test_a_user_or_password_in_the_configuration_is_refused_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("tracking: {}\n")
    for key, addresses in SECRET_ADDRESSES.items():
        for address in addresses:
            with refused(ConfigError, key, "oc.env") as caught:
                load_config([f"{key}={address}", "train.steps=1"])
            assert "secret" not in str(caught.value) and "ada" not in str(caught.value)
            with refused(ConfigError, key, "a user or password"):
                track_sync([tmp_path], [f"{key}={address}"])
    for address in PLAIN_ADDRESSES:
        assert list(check_credentials({"tracking": {"uri": address}, "data": {"path": address}})) == []


SECRET_ADDRESSES = {
    "tracking.uri": [
        "https://ada:secret@mlflow.example",
        "https://a-token@mlflow.example",
        "postgresql://ada:secret@db.example/mlflow",
        "postgresql://ada:se/c#r?et@db.example/mlflow",
        "https://ada:se/c#r?et@mlflow.example",
        "https://${oc.env:USER}:secret@mlflow.example",
        "postgresql+psycopg2:///mlflow?host=/run/db&user=mlflow&password=secret",
        "postgresql://db.example/mlflow?sslpassword=secret",
        "mysql+pymysql://db.example/mlflow?user=mlflow&passwd=${oc.env:SALT}secret",
        "mssql+pyodbc:///?odbc_connect=SERVER%3Ddb%3BPWD%3Dsecret",
    ],
    "data.path": ["https://ada:secret@books.example/pg19"],
}
PLAIN_ADDRESSES = [
    "https://mlflow.example:5000/a@b",
    "https://${oc.env:NAME}:${oc.env:PASSWORD}@mlflow.example",
    "${oc.env:MLFLOW}",
    "postgresql://mlflow@db.example/mlflow",  # libpq asks ~/.pgpass for the password
    "postgresql+psycopg2:///mlflow?host=/run/db&user=mlflow&passfile=/home/ada/.pgpass",
    "postgresql:///mlflow?user=mlflow&password=${oc.env:PASSWORD}&sslpassword=${oc.env:PASSWORD}",
    "mssql+pyodbc:///?odbc_connect=SERVER%3Ddb%3BPWD%3D${oc.env:PASSWORD}%3BUID%3Dmlflow",
    "sqlite:////home/a@b:c/mlflow.db",
    "hf://datasets/ada/pg19@main",
]


@pytest.mark.parametrize(
    ("uri", "login", "shown"),
    [
        ("postgresql://{}db.example/mlflow?sslpassword=secret", "ada:secret@", "postgresql://db.example/mlflow"),
        ("postgresql+psycopg2://{}/mlflow?host=/run/db&password=secret", "", "postgresql+psycopg2:///mlflow"),
        ("postgresql://{}db.example/mlflow", "ada:se/c#r?et@", "postgresql://db.example/mlflow"),
        ("sqlite:////home/a@b/mlflow.db?timeout=5{}", "", "sqlite:////home/a@b/mlflow.db?timeout=5"),
    ],
)
def test_a_message_about_a_store_has_its_address_without_user_and_password(uri: str, login: str, shown: str) -> None:
    lines: list[str] = []
    report = sender.hide_credentials(lines.append, uri.format(login))
    report(f"MLflow at {uri.format(login)} cannot be used now ({login}db.example is down)")
    assert lines == [f"MLflow at {shown} cannot be used now (db.example is down)"]

"""Remote data from a server that is no friend: credentials go nowhere else, https stays https, bodies have an end."""

import shutil
import ssl
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import connector

from dist_mem.__main__ import main
from dist_mem.config import DataConfig
from dist_mem.data import directory
from dist_mem.data.directory import local_dir, refresh
from dist_mem.data.remote.fetch import RemoteError, UnreachableError, WrongRemoteError
from dist_mem.data.shard import fetch_shards, read_tokens
from tests.support.certificates import write_certificates
from tests.support.file_server import ENDLESS_BYTES, SHARD, FileServer, be_impatient, opened
from tests.support.messages import refused, said

pytestmark = pytest.mark.servers

LOGIN = "Basic YWRhOnMzY3JldA=="  # ada:s3cret


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a .netrc, and a CA of our own."""
    be_impatient(monkeypatch)
    write_certificates(tmp_path)
    monkeypatch.setattr(connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=tmp_path / "ca.pem"))
    monkeypatch.setenv("HOME", str(tmp_path))
    write_netrc(tmp_path, "machine 127.0.0.1 login ada password s3cret\n")


def write_netrc(home: Path, text: str, mode: int = stat.S_IRUSR | stat.S_IWUSR) -> None:
    (home / ".netrc").write_text(text, encoding="utf-8")
    (home / ".netrc").chmod(mode)


@pytest.fixture
def secure(server: FileServer, tmp_path: Path) -> Iterator[FileServer]:
    """The same files over https."""
    with closing(FileServer(server.root, certificate=tmp_path / "server.pem")) as found:
        yield found


def data_at(url: str, tmp_path: Path) -> DataConfig:
    return DataConfig(path=url, cache=str(tmp_path / "cache"))


def test_a_login_and_a_query_of_an_address_are_sent_and_not_shown(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_at(server.url.replace("//", "//ada:s3cret@") + "?signature=0123abc", tmp_path)
    index = opened(data)
    assert server.credentials == {LOGIN}
    for fault in (500, "cut", 404, f"{server.url}:x/?signature=0123abc"):
        server.faults[SHARD] = [fault]
        with pytest.raises(RemoteError) as caught:
            fetch_shards(index)
        index = opened(data)
        shown = str(caught.value) + caplog.text
        assert SHARD in shown and "s3cret" not in shown and "0123abc" not in shown


def test_https_is_not_followed_to_http(server: FileServer, secure: FileServer, tmp_path: Path) -> None:
    secure.faults["tokenizer.json"] = [f"{server.url}/tokenizer.json"]
    with refused(WrongRemoteError, f"{secure.url}/tokenizer.json"):
        refresh(data_at(secure.url, tmp_path), [])
    assert not server.asked
    assert secure.asked["tokenizer.json"] == 1  # the same answer each time
    server.faults["tokenizer.json"] = [f"{secure.url}/elsewhere/tokenizer.json"]
    secure.faults["elsewhere/tokenizer.json"] = ["none"]
    shutil.copytree(server.root, server.root / "elsewhere")
    refresh(data_at(server.url, tmp_path), [])  # from http to https there is nothing to lose


@pytest.mark.parametrize("scheme", ["file", "ftp"])
def test_a_server_sends_nobody_to_other_protocols(
    server: FileServer, secure: FileServer, tmp_path: Path, scheme: str
) -> None:
    for each in (server, secure):
        each.faults["tokenizer.json"] = [f"{scheme}://127.0.0.1{server.root}/tokenizer.json"]
        with refused(WrongRemoteError, f"{each.url}/tokenizer.json", f"{scheme}:"):
            refresh(data_at(each.url, tmp_path), [])


@pytest.mark.parametrize(
    ("machine", "sent"), [("machine 127.0.0.1", LOGIN), ("machine elsewhere.example", None), ("default", None)]
)
def test_netrc_is_for_its_own_host_over_https(
    server: FileServer, secure: FileServer, tmp_path: Path, machine: str, sent: str | None
) -> None:
    write_netrc(tmp_path, f"{machine} login ada password s3cret\n")
    for each, expected in ((secure, sent), (server, None)):
        fetch_shards(opened(data_at(each.url, tmp_path)))
        assert each.credentials == {expected}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("how", ["netrc", "address"])
def test_a_redirect_takes_no_credentials_elsewhere(
    server: FileServer, secure: FileServer, tmp_path: Path, host: str, how: str
) -> None:
    """To another host, and to another port of the same one, which may be another user's."""
    other = FileServer(server.root, certificate=tmp_path / "server.pem")
    url = other.url.replace("127.0.0.1", host)
    write_netrc(tmp_path, "".join(f"machine {name} login ada password s3cret\n" for name in ("127.0.0.1", "localhost")))
    secure.faults["tokenizer.json"] = [f"{url}/tokenizer.json"]
    login = "" if how == "netrc" else "ada:s3cret@"
    refresh(data_at(secure.url.replace("//", f"//{login}"), tmp_path), [])
    assert secure.credentials == {LOGIN} and other.credentials == {None}
    other.close()


@pytest.mark.parametrize(("more", "mode"), [("", 0o644), (" s3cret", 0o600)])
def test_an_unfit_netrc_is_named_and_not_shown(secure: FileServer, tmp_path: Path, more: str, mode: int) -> None:
    write_netrc(tmp_path, f"machine 127.0.0.1 login ada password s3cret{more}\n", mode)
    with refused(WrongRemoteError, f"{tmp_path}/.netrc") as caught:
        refresh(data_at(secure.url, tmp_path), [])
    assert "s3cret" not in str(caught.value)
    assert not secure.asked


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json", "train/index.json"])
def test_a_body_ends_where_it_may_be_no_longer(
    server: FileServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "METADATA_BYTES", 2**20)
    data = data_at(server.url, tmp_path)
    size = 10_240 if name == SHARD else 2**20
    server.faults[name] = ["endless"]
    with refused(WrongRemoteError, f"{server.url}/{name}", f"{size:,}"):
        fetch_shards(opened(data))
    assert server.asked[name] == 2
    assert server.num_sent < ENDLESS_BYTES / 4
    assert not list(local_dir(data).rglob("*.partial"))


def test_a_certificate_of_nobody_we_trust_is_refused(
    secure: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context())
    with refused(WrongRemoteError, f"{secure.url}/tokenizer.json", "certificate"):
        refresh(data_at(secure.url, tmp_path), [])
    assert not secure.asked


@pytest.fixture
def hub(secure: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A Hugging Face hub with the data set ada/books."""
    from huggingface_hub import constants

    shutil.copytree(secure.root, secure.root / "datasets" / "ada" / "books" / "resolve" / "v1")
    monkeypatch.setattr(constants, "ENDPOINT", secure.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", secure.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    return secure


def test_a_hub_is_read_with_its_token_alone(hub: FileServer, tmp_path: Path) -> None:
    opened(data_at("hf://datasets/ada/books@v1", tmp_path))
    assert hub.credentials == {"Bearer hf_s3cret"}
    name = f"datasets/ada/books/resolve/v1/{SHARD}"
    other = FileServer(hub.root, certificate=tmp_path / "server.pem")
    hub.faults[name] = [f"{other.url}/{SHARD}"]
    read_tokens(opened(data_at("hf://datasets/ada/books@v1", tmp_path)), 0)
    assert other.credentials == {None}
    other.close()


def test_a_hub_that_cannot_be_reached_is_asked_again_and_named(hub: FileServer, tmp_path: Path) -> None:
    hub.close()
    with refused(UnreachableError, "hf://datasets/ada/books/tokenizer.json"):
        refresh(data_at("hf://datasets/ada/books", tmp_path), [])


@pytest.mark.parametrize(
    ("path", "named"),
    [
        *((path, "tokenizer.json") for path in ("hf://x", "hf://", "hf://buckets/ada/books", "hf://datasets/ada")),
        ("s3://ada:s3cret@bucket/books", "s3://bucket/books/tokenizer.json"),
        ("gs://ada:s3cret@bucket/books", "gs://bucket/books/tokenizer.json"),
    ],
)
def test_an_address_of_no_hub_or_a_bucket_with_a_password_is_named(tmp_path: Path, path: str, named: str) -> None:
    with refused(WrongRemoteError, named) as caught:
        refresh(data_at(path, tmp_path), [])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("lost", [["train/index.json"], ["train/index.json", "tokenizer.json"], ["tokenizer.json"]])
@pytest.mark.parametrize("action", ["show", "verify"])
def test_what_an_address_lacks_is_named_without_its_secrets(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, lost: list[str]
) -> None:
    for name in lost:
        server.faults[name] = [404]
    url = server.url.replace("//", "//ada:s3cret@") + "?signature=0123abc"
    assert main(["data", action, url, "--cache", str(tmp_path / "cache")]) == (1 if action == "verify" else 2)
    shown = capsys.readouterr().err
    said(shown, f"{server.url}/tokenizer.json" if lost[-1] == "tokenizer.json" else server.url)
    assert "s3cret" not in shown and "0123abc" not in shown and "it has neither" not in shown

"""Addresses: what of them selects content, and what is refused; waits that end, and say so."""

import fcntl
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import pytest

from dist_mem.config import DataConfig
from dist_mem.data.directory import local_dir, refresh
from dist_mem.data.index import INDEX_NAME
from dist_mem.data.remote import fetch as remote
from dist_mem.data.remote.fetch import (
    RefusedError,
    UnreachableError,
    WrongRemoteError,
    address,
    check_address,
    hold_lock,
    identity,
    show,
)
from dist_mem.errors import StoppedError
from dist_mem.runtime.signals import StopSignal
from tests.support.file_server import SHARD, FileServer, be_impatient, opened
from tests.support.lane_corpus import make_split
from tests.support.messages import refused

pytestmark = pytest.mark.servers


SIGNED = [
    "X-Amz-Algorithm=AWS4&X-Amz-Credential=me&X-Amz-Date=1&X-Amz-Expires=9&X-Amz-Signature=abc",
    "AWSAccessKeyId=me&Signature=abc&Expires=1",
    "X-Goog-Credential=me&X-Goog-Signature=abc",
    "sv=2024&st=1&se=2&sr=b&sp=r&sig=abc",
    "Expires=1&Signature=abc&Key-Pair-Id=me&Policy=x",
    "token=abc",
    "access_token=abc",
    "api_key=abc",
]
SELECTING = ["v=1", "versionId=3", "generation=7", "file=a/b&download=1", "key=books", "sv=2", "policy=a", "expires=no"]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_of_a_query_only_what_changes_daily_is_left_out(scheme: str) -> None:
    plain = f"{scheme}://host/books"
    for signed in SIGNED:
        assert identity(f"{plain}?{signed}") == plain
        assert identity(f"{plain}?v=1&{signed}") == identity(f"{plain}?v=1") != plain
        assert "abc" not in show(f"{plain}?{signed}")
    identities = {identity(f"{plain}?{query}") for query in SELECTING}
    assert len(identities - {plain}) == len(SELECTING)
    assert identity(f"{scheme}://me:secret@host/books") == plain


# Keys of object storage are no URLs.


class Shelf:
    """A file system of fsspec with the files of a folder, under their whole keys."""

    def __init__(self, root: Path) -> None:
        self.loop = fsspec.asyn.get_loop()
        self.root = root
        self.asked: list[str] = []

    async def _get_file(self, rpath: str, lpath: str, callback: Any) -> None:
        self.asked.append(rpath)
        content = (self.root / rpath.partition("://")[2]).read_bytes()
        Path(lpath).write_bytes(content)
        callback.relative_update(len(content))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    found = Shelf(tmp_path / "buckets")
    be_impatient(monkeypatch)
    monkeypatch.setattr(remote, "require", lambda *_: None)
    monkeypatch.setattr(fsspec, "filesystem", lambda _: found)
    return found


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("key", ["data#2", "q?x", "v#2/a?b", "100%25", "a b", "data"])
def test_every_character_of_a_key_belongs_to_it(shelf: Shelf, tmp_path: Path, scheme: str, key: str) -> None:
    folder = shelf.root / "bucket" / key
    make_split(folder / "train", [5, 6])
    (folder / "tokenizer.json").write_text('{"format_version": 1, "kind": "bytes", "vocab_size": 257, "bos_id": 256}')
    source = address(f"{scheme}://bucket/{key}", f"train/{INDEX_NAME}")
    assert source.url == source.shown == f"{scheme}://bucket/{key}/train/{INDEX_NAME}"
    remote.download(source, tmp_path / "copy", limit=10**6, verify=lambda path: None)
    assert (tmp_path / "copy").read_bytes() == (folder / "train" / INDEX_NAME).read_bytes()
    paths = {identity(f"{scheme}://bucket/{each}") for each in ("data", "data#2", "data?x", "data#3")}
    assert len(paths) == 4


@pytest.mark.parametrize(
    "url", ["s3://b/data?versionId=3", "gs://b/data?generation=3", "s3://b/d?X-Amz-Signature=abc", "https://h/data#2"]
)
def test_an_address_that_asks_for_what_nobody_reads_is_refused(url: str) -> None:
    with refused(WrongRemoteError, f"data.path is {re.split('[?#]', url)[0]} with a") as caught:
        check_address(url)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "way"), [("s3", "FSSPEC_S3_ANON=true"), ("gs", "FSSPEC_GS_TOKEN=anon")])
def test_a_bucket_that_cannot_be_read_names_the_way_without_a_login(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, way: str
) -> None:
    kind = type("NoCredentialsError", (Exception,), {})
    for error in (kind("Unable to locate credentials"), PermissionError("Access Denied")):

        async def fail(error: Exception = error, **arguments: object) -> None:
            raise error

        monkeypatch.setattr(shelf, "_get_file", fail)
        with refused(WrongRemoteError, f"{scheme}://bucket/books", way):
            refresh(DataConfig(path=f"{scheme}://bucket/books", cache=str(tmp_path)), [])


# A server that no wait helps against, and waits.


@pytest.mark.parametrize("fault", [999, 600, 418, "file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_what_no_other_attempt_changes_is_final_at_once(server: FileServer, data: DataConfig, fault: int | str) -> None:
    server.faults["tokenizer.json"] = [fault]
    with pytest.raises(WrongRemoteError) as caught:
        refresh(data, [])
    assert isinstance(caught.value, RefusedError) == isinstance(fault, int)
    assert server.asked["tokenizer.json"] == 1


def test_a_server_that_sends_next_to_nothing_is_given_up_and_said_meanwhile(
    server: FileServer, data: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = opened(data)
    monkeypatch.setattr(remote, "SLOW_SECONDS", 0.5)
    monkeypatch.setattr(remote, "WORD_SECONDS", 0.2)
    monkeypatch.setattr(remote, "RETRY_PAUSES", ())
    server.faults[SHARD] = ["dripping"]
    with refused(UnreachableError, f"{server.url}/{SHARD}", "a second"):
        index.source.fetch(index.shards[0])
    assert f"waiting for {server.url}/{SHARD}: " in caplog.text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_wait_for_a_server_and_one_for_a_lock_end_by_a_signal(
    server: FileServer, data: DataConfig, name: str
) -> None:
    index = opened(data)
    server.faults[SHARD] = ["stalled"]

    def send() -> None:
        server.stalls.wait(60)
        os.kill(os.getpid(), getattr(signal, name))

    with StopSignal():
        threading.Thread(target=send, daemon=True).start()
        with refused(StoppedError, f"{server.url}/{SHARD}", name):
            index.source.fetch(index.shards[0])
        path = local_dir(data) / "any.lock"
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with refused(StoppedError, name), hold_lock(path):
                raise AssertionError

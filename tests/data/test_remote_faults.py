"""Faults of a server, of the disk and of this process while data is fetched: named, and never half a file."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec.asyn
import pytest

from dist_mem.config import DataConfig, EvalConfig
from dist_mem.data.directory import local_dir, refresh, refresh_on_all_ranks
from dist_mem.data.remote import fetch as remote
from dist_mem.data.remote.fetch import FailedRemoteError, RefusedError, RemoteError, UnreachableError, WrongRemoteError
from dist_mem.data.shard import Index, ShardError, check_document, fetch_shards, read_tokens
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE, StoppedEarlyError, UnusableError
from dist_mem.runtime import rounds
from dist_mem.runtime.distributed import World
from dist_mem.training import opening
from tests.support.file_server import SHARD, FileServer, be_impatient, opened, start_fetch
from tests.support.lane_corpus import LENGTHS
from tests.support.limits import limit
from tests.support.messages import refused, said_line
from tests.support.ranks import Pools

pytestmark = pytest.mark.servers


def leftovers(data: DataConfig) -> list[str]:
    """Everything in the cache but whole files and locks."""
    return [path.name for path in local_dir(data).rglob("*") if path.is_file() and path.suffix in (".partial", ".tar")]


@pytest.mark.parametrize(
    ("fault", "error", "requests"),
    [
        *((404, RefusedError, 1), (403, RefusedError, 1), (500, UnreachableError, 3), ("cut", UnreachableError, 3)),
        *(("short", WrongRemoteError, 2), ("page", WrongRemoteError, 2)),
        *(("silent", UnreachableError, 3), ("stalled", UnreachableError, 3), ("gone", UnreachableError, 0)),
    ],
)
def test_a_fault_of_the_server_is_named_in_time_and_leaves_nothing(
    server: FileServer,
    data: DataConfig,
    monkeypatch: pytest.MonkeyPatch,
    fault: int | str,
    error: type[RemoteError],
    requests: int,
) -> None:
    index = opened(data)
    server.faults[SHARD] = [fault]
    if fault in ("silent", "stalled"):
        monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    if fault == "gone":
        server.close()
    for _ in range(2):  # the second answer needs no server
        with refused(error, f"{server.url}/{SHARD}") as caught:
            read_tokens(index, 0)
        assert caught.value.exit_code == (EXIT_FAILED if error is UnreachableError else EXIT_USAGE)
        assert not isinstance(caught.value, ShardError)  # data.on_corrupt: skip would leave the document out
    assert server.asked[SHARD] == requests
    assert not leftovers(data)


class FailingBucket:
    """A file system of fsspec whose every transfer ends with an error."""

    def __init__(self, error: Exception) -> None:
        self.loop = fsspec.asyn.get_loop()
        self.error = error
        self.num_asked = 0

    async def _get_file(self, **arguments: object) -> None:
        self.num_asked += 1
        raise self.error


def of_gcsfs(status: int) -> Exception:
    retry = pytest.importorskip("gcsfs.retry", reason="gcsfs is not installed")
    with pytest.raises(Exception) as caught:  # whatever gcsfs makes of it
        retry.validate_response(status, b'{"error": {"message": "denied"}}', "books/tokenizer.json")
    return caught.value


def of_s3fs(status: int, code: str) -> Exception:
    errors = pytest.importorskip("s3fs.errors", reason="s3fs is not installed")
    from botocore.exceptions import ClientError

    response = {"Error": {"Code": code, "Message": "denied"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    translated: Exception = errors.translate_boto_error(ClientError(response, "GetObject"))
    return translated


def without_login(name: str, derived: str | None = None) -> Exception:
    """An error of botocore or google-auth, by the name of its class, or of one that is derived from it."""
    kind: type[Exception] = type(name, (Exception,), {})
    return (type(derived, (kind,), {}) if derived else kind)("Unable to locate credentials")


FROM_BUCKETS: dict[str, tuple[Callable[[], Exception], type[RemoteError]]] = {
    **{f"gcsfs {status}": (partial(of_gcsfs, status), RefusedError) for status in (401, 403, 404, 410)},
    **{f"gcsfs {status}": (partial(of_gcsfs, status), UnreachableError) for status in (429, 502, 503)},
    "s3fs 401": (partial(of_s3fs, 401, "401"), RefusedError),
    "s3fs 403": (partial(of_s3fs, 403, "AccessDenied"), RefusedError),
    "s3fs 404": (partial(of_s3fs, 404, "NoSuchKey"), RefusedError),
    "s3fs token": (partial(of_s3fs, 400, "InvalidToken"), RefusedError),
    "s3fs timeout": (partial(of_s3fs, 400, "RequestTimeout"), UnreachableError),
    "s3fs 503": (partial(of_s3fs, 503, "SlowDown"), UnreachableError),
    "no login at Google": (partial(without_login, "DefaultCredentialsError", "MalformedError"), WrongRemoteError),
    "no login at Amazon": (partial(without_login, "NoCredentialsError"), WrongRemoteError),
    "a part of a login": (partial(without_login, "PartialCredentialsError"), WrongRemoteError),
    "no such profile": (partial(without_login, "ProfileNotFound"), WrongRemoteError),
}


@pytest.mark.parametrize("fault", FROM_BUCKETS)
def test_a_lasting_refusal_of_a_bucket_is_final_and_a_passing_one_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    make, kind = FROM_BUCKETS[fault]
    bucket = FailingBucket(make())
    be_impatient(monkeypatch)
    monkeypatch.setattr(remote, "require", lambda *_: None)
    monkeypatch.setattr(fsspec, "filesystem", lambda _: bucket)
    with refused(kind, "gs://bucket/books/tokenizer.json") as caught:
        refresh(DataConfig(path="gs://bucket/books", cache=str(tmp_path)), [])
    assert type(caught.value) is kind
    assert bucket.num_asked == (3 if kind is UnreachableError else 1)


def test_a_login_that_fails_before_the_transfer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scheme: str) -> None:
        raise without_login("DefaultCredentialsError")

    monkeypatch.setattr(remote, "require", lambda *_: None)
    monkeypatch.setattr(fsspec, "filesystem", fail)
    with refused(WrongRemoteError, "gs://bucket/books/tokenizer.json"):
        refresh(DataConfig(path="gs://bucket/books", cache=str(tmp_path)), [])


def test_a_redirect_without_end_is_final(server: FileServer, data: DataConfig) -> None:
    index = opened(data)
    server.faults[SHARD] = [f"{server.url}/{SHARD}"]
    with refused(WrongRemoteError, f"{server.url}/{SHARD}"):
        read_tokens(index, 0)
    assert server.asked[SHARD] == 10  # redirects that aiohttp follows


def test_a_name_server_that_does_not_answer_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_impatient(monkeypatch)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(60))
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.3)
    began = time.monotonic()
    with refused(UnreachableError, "https://books.example/pg19/tokenizer.json", "nothing came for 0.3 s"):
        refresh(DataConfig(path="https://books.example/pg19", cache=str(tmp_path)), [])
    assert time.monotonic() - began < limit(10)
    released.set()


@pytest.mark.parametrize(
    "faults", [[500, "none"], ["cut", 503, "none"], ["page", "none"], ["stalled", "none"], ["cut", "cut", "none"]]
)
def test_a_fault_that_passes_is_survived(
    server: FileServer, data: DataConfig, monkeypatch: pytest.MonkeyPatch, faults: list[int | str]
) -> None:
    index = opened(data)
    server.faults[SHARD] = faults
    monkeypatch.setattr(remote, "STALL_SECONDS", 2.0)
    check_document(index, 0)
    assert leftovers(data) == [Path(SHARD).name]


@pytest.mark.parametrize("fault", [404, "page", "short"])
@pytest.mark.parametrize("name", ["tokenizer.json", "train/index.json"])
def test_a_start_without_its_index_or_tokenizer_names_the_url(
    server: FileServer, data: DataConfig, name: str, fault: int | str
) -> None:
    fetch_shards(opened(data))
    server.faults[name] = [fault]
    with refused(WrongRemoteError, f"{server.url}/{name}"):
        refresh(data, ["train"])


def test_a_start_remembers_whether_another_one_may_succeed(server: FileServer, data: DataConfig) -> None:
    """Processes of one start share one request; each of them ends with the code of the first."""
    for fault, kind in [(403, WrongRemoteError), (500, FailedRemoteError)]:
        server.faults["tokenizer.json"] = [fault]
        for _ in range(2):
            with refused(kind, fault):
                refresh(data, ["train"], start=f"start {fault}")


def start_twice(world: World, data: DataConfig) -> list[str]:
    reported = []
    for _ in range(2):
        with pytest.raises(UnusableError) as caught:
            refresh_on_all_ranks(data, ["train"])
        reported.append(str(caught.value))
    return reported


def test_a_failed_start_asks_once_and_tells_every_rank(server: FileServer, data: DataConfig, rank_pool: Pools) -> None:
    server.faults["train/index.json"] = [403]
    (first, again), other = rank_pool(2).run(start_twice, data)
    assert first == again and other == [first, again] and f"{server.url}/train/index.json" in first
    assert server.asked["train/index.json"] == 2


def open_until_signal(world: World, data: DataConfig, sent: Path) -> str:
    """What a rank raises whose server does not answer, when a signal reaches rank 1: as soon as `sent` exists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "STALL_SECONDS", limit(60))
        patch.setattr(rounds, "ROUND_SECONDS", 0.1)
        patch.setattr(rounds, "received_signal", lambda: "SIGTERM" if world.rank and sent.exists() else None)
        with pytest.raises(StoppedEarlyError) as caught:
            opening._open_data(data, EvalConfig(every=1, split="train"))
    return str(caught.value)


@pytest.mark.parametrize("name", ["train/index.json", SHARD])
def test_a_signal_to_one_rank_ends_the_fetch_of_all(
    server: FileServer, data: DataConfig, rank_pool: Pools, tmp_path: Path, name: str
) -> None:
    server.faults[name] = ["silent"]
    sent = tmp_path / "sent"

    def send_when_asked() -> None:
        if server.stalls.wait(limit(60)):
            sent.touch()

    threading.Thread(target=send_when_asked, daemon=True).start()
    began = time.monotonic()
    text, other = rank_pool(2).run(open_until_signal, data, sent)
    assert text == other and "stopped by SIGTERM" in text
    assert time.monotonic() - began < limit(30)
    assert not leftovers(data)


def test_a_full_cache_does_without_the_server(
    server: FileServer, data: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = [read_tokens(opened(data), document).tolist() for document in range(len(LENGTHS))]
    server.close()
    with caplog.at_level(logging.WARNING):
        index = opened(data)
    said_line("\n".join(caplog.messages), f"{server.url}/tokenizer.json: ", local_dir(data))
    assert [read_tokens(index, document).tolist() for document in range(len(LENGTHS))] == before
    with pytest.raises(UnreachableError, match=server.url):
        refresh(data, ["train", "validation"])  # never fetched


def test_a_full_disk_is_named_and_leaves_nothing(data: DataConfig) -> None:
    index = opened(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk, but for the words of the system
    try:
        with refused(FailedRemoteError, index.split_dir, "data.cache"):
            read_tokens(index, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not leftovers(data)


def test_a_cache_that_cannot_be_written_is_named(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = DataConfig(path=server.url, cache=str(tmp_path / "file" / "cache"))
    with refused(WrongRemoteError, "data.cache"):
        opened(data)


def test_a_fetch_killed_in_the_middle_leaves_the_next_one_a_free_way(server: FileServer, data: DataConfig) -> None:
    index = opened(data)
    server.faults[SHARD] = ["stalled", "none"]
    process = start_fetch(data)
    assert server.stalls.wait(limit(30))
    process.kill()
    process.communicate()
    assert leftovers(data) == [f"{Path(SHARD).name}.partial"]
    check_document(index, 0)
    assert leftovers(data) == [Path(SHARD).name]


def test_close_ends_a_fetch_that_hangs(server: FileServer, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_SECONDS", 60.0)
    index, waiting = opened(data), opened(data)
    server.faults[SHARD] = ["silent"]
    reported: list[str] = []

    def fetch(one: Index) -> None:
        with pytest.raises(RemoteError) as caught:
            fetch_shards(one)
        reported.append(str(caught.value))

    threads = [threading.Thread(target=fetch, args=(one,)) for one in (index, waiting)]  # one of them holds the lock
    for thread in threads:
        thread.start()
    assert server.stalls.wait(limit(10))
    began = time.monotonic()
    for one in (index, waiting):
        one.source.close()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < limit(5)
    assert len(reported) == 2 and all("given up, the reader was closed" in text for text in reported)

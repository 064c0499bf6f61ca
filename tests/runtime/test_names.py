"""No name in a file or from a server leads out of the folder that it is a name in."""

import hashlib
import json
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_mem.config import DataConfig
from dist_mem.data.directory import open_index, refresh
from dist_mem.data.index import fingerprint_of
from dist_mem.data.remote.fetch import WrongRemoteError
from dist_mem.data.shard import fetch_shards, read_index, write_split
from dist_mem.data.tar import TokenizedDocument
from dist_mem.datasets.bucket_download import download_files, list_files
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from tests.support import paths
from tests.support.bucket import LISTING, Bucket
from tests.support.file_server import FileServer
from tests.support.messages import refused

pytestmark = pytest.mark.servers

GOLDEN = paths.GOLDEN / "formats" / "data"
TAR = "frozen-train-00000.tar"
UP = "../../../victim"
ABSOLUTE = "the absolute path of a file there"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that nobody names; empty."""
    (tmp_path / "victim").mkdir()
    return tmp_path / "victim"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "books"))


@pytest.fixture
def server(books: Path) -> Iterator[FileServer]:
    server = FileServer(books)
    yield server
    server.close()


def rewrite_index(books: Path, **changes: Any) -> None:
    """An index that says something else, with the fingerprint that it must have."""
    path = books / "train" / "index.json"
    body = {**json.loads(path.read_text()), **changes}
    body["fingerprint"] = fingerprint_of(body)
    path.write_text(json.dumps(body))


def renamed_tar(books: Path, name: str) -> dict[str, Any]:
    content = (books / "train" / TAR).read_bytes()
    (books / "train" / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".tar"):  # not over the index itself
        (books / "train" / name).write_bytes(content)
    return {"shards": [{"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]}


BAD_NAMES = ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", ".bashrc", "../x", "x" * 256, "é" * 128]
WRITTEN = [
    *((key, value) for key in ("name", "split") for value in (f"{UP}/x", "..", ABSOLUTE, "a/b", ".bashrc", "", 7)),
    *(("tar", f"{place}.tar") for place in (f"{UP}/x", "../x", "a/b", ".hidden")),
    *(("tar", name) for name in ("index.json", "whole.json")),
]


@pytest.mark.parametrize("where", ["local", "server"])
@pytest.mark.parametrize(("key", "value"), WRITTEN)
def test_a_name_in_an_index_writes_nothing_elsewhere(
    books: Path, server: FileServer, tmp_path: Path, victim: Path, where: str, key: str, value: Any
) -> None:
    changes = {key: str(victim / "x") if value == ABSOLUTE else value}
    rewrite_index(books, **(renamed_tar(books, value) if key == "tar" else changes))
    for path in victim.rglob("*"):
        path.unlink()
    address, node, cache = str(books) if where == "local" else server.url, tmp_path / "node", str(tmp_path / "cache")
    data = DataConfig(path=address, stage="node", stage_dir=str(node), cache=cache)
    with suppress(OSError, ValueError, TypeError):
        refresh(data, ["train"])
        fetch_shards(open_index(data, "train"))
    assert not list(victim.rglob("*"))
    assert not list(node.rglob("*.tar"))
    with pytest.raises(UnusableError, match=r"index\.json is damaged .*must be one plain name"):  # values are cut
        refresh(data, ["train"])
        open_index(data, "train")


@pytest.mark.parametrize("value", BAD_NAMES)
@pytest.mark.parametrize("key", ["name", "split"])
def test_nobody_can_write_an_index_that_nobody_reads(tmp_path: Path, key: str, value: str) -> None:
    document = TokenizedDocument("a", "t", None, 1, 3, np.arange(3, dtype=np.uint16))
    names: dict[str, Any] = {"name": "books", "split": "train", key: value}
    with pytest.raises(ValueError, match=f"{key} is .*one plain name"):
        write_split([document], tmp_path / "out", tokenizer_fingerprint="0" * 64, **names)
    source = SourceDocument("a", "t", "text", recall=[])
    with pytest.raises(ValueError, match=f"{key} is .*one plain name"):
        build_dataset({names["split"]: [source]}, tmp_path / "out", name=names["name"], tokenizer_kind="bytes")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["My books 2", "pg19", "naïve", "a..b", "x" * 200])
def test_ordinary_names_stay_usable(tmp_path: Path, name: str) -> None:
    document = TokenizedDocument("a", "t", None, 1, 3, np.arange(3, dtype=np.uint16))
    write_split([document], tmp_path / "out", tokenizer_fingerprint="0" * 64, name=name, split="train")
    assert read_index(tmp_path / "out").name == name


@pytest.mark.parametrize("name", ["train/../../victim/x", ABSOLUTE, "train/.bashrc", "train//x", "train/a\nb"])
def test_a_listing_of_a_bucket_writes_nothing_elsewhere(tmp_path: Path, victim: Path, name: str) -> None:
    name = str(victim / "x") if name == ABSOLUTE else name
    with closing(Bucket(tmp_path)) as bucket:
        bucket.altered[f"/books/{urllib.parse.quote(name)}"] = b"text"
        bucket.altered[LISTING] = json.dumps({"items": [{"name": name, "size": "4"}]}).encode()
        with suppress(WrongRemoteError):
            download_files(bucket.url, list_files(bucket.url, "train/"), tmp_path / "source")
        assert not list(victim.rglob("*"))
        with refused(WrongRemoteError, bucket.url):
            download_files(bucket.url, list_files(bucket.url, "train/"), tmp_path / "source")

"""Data at a URL is the same as local data, fetched once a node, and gives training, evaluation and checks the same."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dist_mem.__main__ import main
from dist_mem.config import DataConfig
from dist_mem.data.directory import local_dir, open_index, open_tokenizer, refresh, refresh_on_all_ranks
from dist_mem.data.documents import Documents
from dist_mem.data.plan import START, DocumentPlan
from dist_mem.data.remote.fetch import WrongRemoteError, address, is_remote, show
from dist_mem.data.segments import read_lane
from dist_mem.data.shard import Index, check_document, fetch_shards, read_index, read_tokens
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.errors import UnusableError
from dist_mem.evaluation import evaluate
from dist_mem.runtime import extras
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from tests.support.faults import flip
from tests.support.file_server import SHARD, FileServer, be_impatient, opened
from tests.support.jobs import build_books, checkpoint_content, difference, losses, run_ranks, train_here, write_config
from tests.support.lane_corpus import BOS, LENGTHS, SEG_LEN, make_split
from tests.support.limits import wait_until
from tests.support.messages import refused, said
from tests.support.ranks import Pools, launcher_environment
from tests.support.tokenizer_kinds import MAKE

pytestmark = pytest.mark.servers


def test_remote_documents_equal_local_ones(server: FileServer, data: DataConfig) -> None:
    index, local = opened(data), read_index(server.root / "train")
    assert len(index.shards) > 3
    assert index == Index(**{**vars(local), "split_dir": index.split_dir})
    whole = {"tokenizer.json", "train/index.json", "train/documents.safetensors"}  # tars come when they are needed
    assert server.asked.keys() == {*whole, "train/build.json"}  # which was not written
    for document in range(len(LENGTHS)):
        check_document(index, document)
        assert np.array_equal(read_tokens(index, document), read_tokens(local, document))
    assert open_tokenizer(data).fingerprint == BytesTokenizer().fingerprint
    assert set(server.asked.values()) == {1}
    server.asked.clear()
    fetch_shards(opened(data))
    changing = {"tokenizer.json": 1, "train/index.json": 1, "train/build.json": 1}
    assert server.asked == changing, "only what may have changed"


def read_everything(world: World, data: DataConfig) -> list[int]:
    refresh_on_all_ranks(data, ["train"])
    index = open_index(data, "train")
    return [int(read_tokens(index, document).sum()) for document in range(len(index.documents))]


def test_ranks_that_start_together_fetch_each_file_once(server: FileServer, data: DataConfig, rank_pool: Pools) -> None:
    for name in ("tokenizer.json", "train/index.json", SHARD):
        server.faults[name] = ["slow"]
    first, second = rank_pool(2).run(read_everything, data)
    assert first == second
    assert len(server.asked) > 5 and set(server.asked.values()) == {1}


def test_a_tar_that_changed_on_the_server_is_fetched_again(server: FileServer, data: DataConfig) -> None:
    fetch_shards(opened(data))
    lengths = [LENGTHS[0] + 1, *LENGTHS[1:]]
    sizes = [shard.bytes for shard in read_index(server.root / "train").shards]
    changed = make_split(server.root / "train", lengths, with_extras=True, max_shard_bytes=60)
    assert [shard.bytes for shard in changed.shards] == sizes  # only their checksums tell them apart
    index = opened(data)
    assert read_tokens(index, 0).tolist() == read_tokens(changed, 0).tolist()
    assert server.asked[SHARD] == 2


def test_an_index_that_changed_on_the_server_alone_is_noticed(server: FileServer, data: DataConfig) -> None:
    old = (server.root / SHARD).read_bytes()
    make_split(server.root / "train", [LENGTHS[0] + 1, *LENGTHS[1:]], with_extras=True, max_shard_bytes=60)
    (server.root / SHARD).write_bytes(old)
    with refused(WrongRemoteError, f"{server.url}/{SHARD}"):
        fetch_shards(opened(data))


def test_a_tar_damaged_in_the_cache_is_fetched_again(server: FileServer, data: DataConfig) -> None:
    fetch_shards(opened(data))
    path = local_dir(data) / SHARD
    flip(path, 1000)
    fetch_shards(opened(data))
    assert path.read_bytes() == (server.root / SHARD).read_bytes()
    assert server.asked[SHARD] == 2


def test_a_lane_has_the_tar_of_its_next_document_fetched_ahead(server: FileServer, data: DataConfig) -> None:
    index = opened(data)
    documents = Documents(index, np.array(LENGTHS), bos_id=BOS)
    plan = DocumentPlan(LENGTHS, num_lanes=1, seg_len=SEG_LEN, seed=0)
    next(read_lane(documents, plan, lane=0, cursor=START))
    expected = {index.documents[number].shard for number in plan.documents(0, 0)[:2]}
    wait_until(lambda: {path.name for path in index.split_dir.glob("*.tar")} == expected, f"{expected}", seconds=10)
    index.source.close()


@pytest.mark.parametrize("kind", sorted(MAKE))
def test_a_tokenizer_of_every_kind_is_read_and_comes_as_it_is_now(
    server: FileServer, data: DataConfig, kind: str
) -> None:
    tokenizer = MAKE[kind](" ".join(map(str, range(99))) + "\na river, and a lamp in the water")
    save_tokenizer(tokenizer, server.root)
    opened(data)
    assert open_tokenizer(data).fingerprint == tokenizer.fingerprint
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.files["chat_template.jinja"] = "{{ corrected }}"  # is not in the fingerprint
        save_tokenizer(tokenizer, server.root)
    opened(data)
    assert open_tokenizer(data).content() == tokenizer.content()
    assert server.asked[tokenizer.file_name or ""] == {"bytes": 0, "huggingface": 2}.get(kind, 1)


def test_a_tokenizer_that_is_not_the_described_one_is_refused(server: FileServer, data: DataConfig) -> None:
    save_tokenizer(MAKE["words"]("a lamp"), server.root)
    (server.root / "tokenizer.words").write_bytes(MAKE["words"]("a river").content() or b"")
    with refused(WrongRemoteError, f"{server.url}/tokenizer.words"):
        opened(data)


def test_columns_come_again_only_if_the_index_names_others(server: FileServer, data: DataConfig) -> None:
    opened(data)
    columns = local_dir(data) / "train" / "documents.safetensors"
    make_split(server.root / "train", with_extras=True, max_shard_bytes=1)
    assert opened(data).documents == read_index(server.root / "train").documents
    columns.write_bytes(b"damaged in the cache")
    opened(data)
    assert server.asked["train/documents.safetensors"] == 3


def test_columns_that_are_not_those_of_the_index_are_refused(server: FileServer, data: DataConfig) -> None:
    name = "train/documents.safetensors"
    content = (server.root / name).read_bytes()
    (server.root / name).write_bytes(content[:-1] + b"?")
    with refused(WrongRemoteError, f"{server.url}/{name}"):
        opened(data)
    assert server.asked[name] == 2
    assert not (local_dir(data) / name).exists()


@pytest.mark.parametrize("path", ["htps://host/books", "file:///books", "sftp://host/books", "pipe:cat secret/{}"])
def test_an_unknown_scheme_names_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    with refused(WrongRemoteError, f"{path.partition(':')[0]}: is not among", "https"):
        refresh(DataConfig(path=path, cache=str(tmp_path)), [])
    for command in (["train", "--check", "train.steps=1", f"data.path='{path}'"], ["data", "verify", path]):
        assert main(command) == 2
        reported = capsys.readouterr().err
        said(reported, f"{path.partition(':')[0]}: is not among", "https")
        assert "secret" not in reported


@pytest.mark.parametrize(("scheme", "library"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_bucket_without_its_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(extras, "is_installed", lambda name: name != library)
    with refused(UnusableError, library, f"dist-mem[{scheme}]"):
        refresh(DataConfig(path=f"{scheme}://bucket/books", cache=str(tmp_path)), [])


def test_what_of_a_url_is_used_and_shown_and_directories_are_none(tmp_path: Path) -> None:
    secret = "http://user:pass@host/?signature=abc"
    assert address(secret, "a b/c.json").url == "http://user:pass@host/a%20b/c.json?signature=abc"
    assert show(secret) == "http://host" and show("data/mine") == "data/mine"
    assert show("pipe:curl -H 'Authorization: secret' https://host/{}") == "pipe:"
    cache = str(tmp_path)
    assert local_dir(DataConfig(path=secret, cache=cache)) == local_dir(DataConfig(path="http://host", cache=cache))
    assert not any(map(is_remote, ["data/sample", "/data/a:b", "./x//y", "C:/books"]))
    assert all(map(is_remote, ["http://h/d", "s3://b/d", "hf://datasets/a/b", "pipe:cat {}", "PIPE:x"]))


# Whole commands


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[FileServer]:
    """The books of jobs.py, each in a tar of its own."""
    found = FileServer(build_books(tmp_path, max_shard_bytes=1))
    yield found
    found.close()


def second_book(data: Path) -> tuple[str, int]:
    """The tar of a book that no lane begins with, and the steps before one opens it."""
    index = read_index(data / "train")
    lengths = [entry.num_tokens for entry in index.documents]
    plan = DocumentPlan(lengths, num_lanes=8, seg_len=16, seed=0)
    lanes = [plan.documents(0, lane) for lane in range(8)]
    steps, number = min((-(-lengths[books[0]] // 16), books[1]) for books in lanes if len(books) > 1)
    return index.documents[number].shard, steps


def test_a_job_stopped_by_a_missing_shard_ends_in_the_bits_of_a_local_one(
    shelf: FileServer, tmp_path: Path, rank_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, step = second_book(shelf.root)
    remote_data = {"path": shelf.url, "cache": str(tmp_path / "cache")}
    changes = {"train": {"steps": step + 6}, "eval": {"every": step + 3}}
    local = write_config(tmp_path / "local.yaml", shelf.root, tmp_path / "runs" / "local", changes)
    remote = write_config(
        tmp_path / "remote.yaml", Path(), tmp_path / "runs" / "remote", changes, {"data": remote_data}
    )
    assert rank_pool(2).run(train_here, local) == [0, 0]

    shelf.faults[f"train/{missing}"] = [404]
    codes, text = run_ranks(["train", str(remote)], world_size=2, cwd=tmp_path)
    assert codes == [2, 2], text
    assert text.count(f"{shelf.url}/train/{missing}: HTTP status 404; check the address") == 1
    checkpoints = tmp_path / "runs" / "remote" / "checkpoints"
    assert (checkpoints / f"step-{step:08d}" / "manifest.json").exists()

    shelf.faults.clear()
    assert rank_pool(2).run(train_here, remote) == [0, 0]
    last = f"step-{step + 6:08d}"
    expected = checkpoint_content(tmp_path / "runs" / "local" / "checkpoints" / last)
    assert difference(checkpoint_content(checkpoints / last), expected) is None
    assert losses(tmp_path / "runs" / "remote") == losses(tmp_path / "runs" / "local")
    assert {count for name, count in shelf.asked.items() if name.endswith(".tar") and missing not in name} == {1}

    for name, value in launcher_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)  # else the evaluation here would set them, for all tests after it
    quiet = ["tracking.mlflow=false", "data.path=" + shelf.url]
    assert evaluate.run(tmp_path / "runs" / "local", split="test", overrides=[*quiet, f"data.cache={tmp_path}"]) == 0
    assert evaluate.run(tmp_path / "runs" / "remote", split="test", overrides=quiet) == 0
    first, second = (next(run.glob("evaluations/*.csv")).read_bytes() for run in (tmp_path / "runs").iterdir())
    assert first == second


def test_check_says_what_is_at_a_url(shelf: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [f"data.path={shelf.url}", f"data.cache={tmp_path / 'cache'}", "train.steps=1", "train.global_batch_size=8"]
    assert main(["train", "--check", *data]) == 0
    assert f"{shelf.url}, train: 12 documents" in capsys.readouterr().out
    shelf.faults["train/index.json"] = [404]
    assert main(["train", "--check", *data]) == 2
    assert capsys.readouterr().err.startswith(f"error: {shelf.url}/train/index.json: HTTP status 404")


@pytest.mark.parametrize(("fault", "code"), [(503, 1), ("cut", 1), ("page", 2)])
def test_show_leaves_no_split_out_that_an_address_has(
    shelf: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    fault: int | str, code: int,
) -> None:  # fmt: skip
    be_impatient(monkeypatch)
    shelf.faults["validation/index.json"] = [fault]
    assert main(["data", "show", shelf.url, "--cache", str(tmp_path / "cache")]) == code
    said(capsys.readouterr().err, f"{shelf.url}/validation/index.json")


def test_verify_fetches_and_looks_at_every_byte(
    shelf: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "verify", shelf.url, "--cache", str(tmp_path / "cache")]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{shelf.url}: all is well\n"
    damaged = next((shelf.root / "test").glob("*.tar"))
    flip(damaged, 1000)
    next(tmp_path.glob(f"cache/*/test/{damaged.name}")).unlink()
    assert main(command) == 1
    reported = capsys.readouterr().err
    assert reported.startswith(f"test/{damaged.name}: {shelf.url}/test/{damaged.name} has sha256 ")
    shelf.faults["train/index.json"] = [404]
    assert main([*command, "--split", "validation"]) == 0
    assert main([*command, "--split", "train"]) == 1

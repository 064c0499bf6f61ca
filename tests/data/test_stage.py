"""Shards copied to the node before the first step: whole, once, verified, and without a trace in the training."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dist_mem.config import DataConfig
from dist_mem.data.directory import open_index, refresh, refresh_on_all_ranks
from dist_mem.data.remote import stage
from dist_mem.data.remote.fetch import FailedRemoteError, RemoteError
from dist_mem.data.shard import fetch_shards, read_tokens
from dist_mem.data.verify import verify_dataset
from dist_mem.errors import RunError
from dist_mem.runtime import rounds
from dist_mem.runtime.distributed import World
from tests.support.faults import flip, small_disk
from tests.support.file_server import FileServer, start_fetch
from tests.support.jobs import build_books, checkpoint_content, difference, losses, train_here, write_config
from tests.support.limits import holds_open, limit, wait_until
from tests.support.messages import refused
from tests.support.ranks import Pools

UID = os.getuid()


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """The books of jobs.py, each in a tar of its own."""
    return build_books(tmp_path / "books", max_shard_bytes=1)


def staging(path: Path | str, tmp_path: Path, *, cache: Path | None = None) -> DataConfig:
    """Data to be copied to a node's disk of this test."""
    kept = None if cache is None else str(cache)
    return DataConfig(path=str(path), stage="node", stage_dir=str(tmp_path / "node"), cache=kept)


def fill(data: DataConfig, split: str = "train") -> Path:
    """Copy a split; returns the folder of the copy."""
    index = open_index(data, split)
    fetch_shards(index)
    return index.split_dir.parent


def inodes(folder: Path) -> dict[str, int]:
    """The tars of a copy; one that is copied anew gets another number."""
    return {path.name: path.stat().st_ino for path in folder.rglob("*.tar")}


@pytest.mark.parametrize("kind", ["node", "memory"])
def test_training_from_a_copy_is_the_same_to_the_bit_and_goes_on_from_either(
    books: Path, tmp_path: Path, rank_pool: Pools, kind: str
) -> None:
    changes = {"train": {"steps": 10}, "eval": {"every": 4}, "schedule": {"kind": "constant"}}
    plain = write_config(tmp_path / "plain.yaml", books, tmp_path / "runs" / "plain", changes)
    copied = write_config(
        tmp_path / "copied.yaml", books, tmp_path / "runs" / "copied", changes, {"data": {"stage": kind}}
    )
    where = [f"data.stage_dir={tmp_path / 'node'}"]
    assert rank_pool(2).run(train_here, plain) == [0, 0]
    assert rank_pool(2).run(train_here, copied, [*where, "train.steps=6"]) == [0, 0]
    folders = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "node" / f"dist_mem-{UID}").glob("tiny-*"))
    assert folders == ["tiny-train", "tiny-validation"]
    first = inodes(tmp_path / "node")
    moved = books.with_name("moved")
    books.rename(moved)  # nobody reads the source any more but its index and tokenizer
    for tar in moved.rglob("*.tar"):
        tar.unlink()
    assert rank_pool(2).run(train_here, copied, [*where, f"data.path={moved}"]) == [0, 0]
    assert inodes(tmp_path / "node") == first
    last = "checkpoints/step-00000010"
    runs = tmp_path / "runs"
    assert difference(checkpoint_content(runs / "copied" / last), checkpoint_content(runs / "plain" / last)) is None
    assert losses(runs / "copied") == losses(runs / "plain")
    manifests = [json.loads((runs / name / last / "manifest.json").read_text()) for name in ("plain", "copied")]
    assert manifests[0]["data_fingerprint"] == manifests[1]["data_fingerprint"]


def test_a_copy_is_a_data_directory_that_verifies_and_nobody_else_can_write_into(books: Path, tmp_path: Path) -> None:
    mask = os.umask(0o002)
    try:
        folder = fill(staging(books, tmp_path))
    finally:
        os.umask(mask)
    assert verify_dataset(folder) == []
    root = folder.parent
    assert root.name == f"dist_mem-{UID}" and root.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.tar")} == {0o444}
    fingerprint = open_index(DataConfig(path=str(books)), "train").fingerprint
    assert folder.name == f"tiny-train-{fingerprint[:12]}"


def test_the_usual_places_are_the_temporary_directory_and_shared_memory(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "job"))
    for kind, place in (("node", tmp_path / "job"), ("memory", "/dev/shm")):
        found = open_index(DataConfig(path=str(books), stage=kind), "train").split_dir
        assert found.is_relative_to(f"{place}/dist_mem-{UID}")
    assert not (tmp_path / "job").exists(), "a look at the index, as --check takes it, leaves nothing on the node"
    monkeypatch.delenv("TMPDIR")
    assert open_index(DataConfig(path=str(books), stage="node"), "train").split_dir.is_relative_to("/tmp")


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_into_which_others_can_write_is_refused(books: Path, tmp_path: Path, mode: int) -> None:
    root = tmp_path / "node" / f"dist_mem-{UID}"
    root.mkdir(parents=True)
    root.chmod(mode)
    with pytest.raises(RemoteError, match=f"node {socket.gethostname()}: {root} must be a folder of this user"):
        fill(staging(books, tmp_path))


def stalled(books: Path, until: Path) -> str:
    """Statements after which the copying of the last tar stands still in its middle, until there is such a file."""
    last = open_index(DataConfig(path=str(books)), "train").shards[-1].name
    return f"""
import time
from pathlib import Path
from dist_mem.data.remote import stage

def in_halves(path, closed):
    for piece in read_pieces(path, closed):
        yield piece[: len(piece) // 2]
        while path.name == {last!r} and not Path({str(until)!r}).exists():
            time.sleep(0.01)
        yield piece[len(piece) // 2 :]

read_pieces, stage._read_pieces = stage._read_pieces, in_halves
"""


def test_one_process_of_a_node_copies_and_the_others_wait(books: Path, tmp_path: Path) -> None:
    first = stalled(books, tmp_path / "go")
    processes = [start_fetch(staging(books, tmp_path), first) for _ in range(3)]
    try:
        for process in processes:
            wait_until(partial(holds_open, process, ".lock"), "a process that copies, or waits for it")
        (tmp_path / "go").touch()
        reported = [process.communicate(timeout=limit(90))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0], reported
    assert sum("copying" in text for text in reported) == 1


def test_a_copy_torn_by_a_kill_is_finished(books: Path, tmp_path: Path) -> None:
    index = open_index(DataConfig(path=str(books)), "train")
    process = start_fetch(staging(books, tmp_path), stalled(books, tmp_path / "never"))
    target = open_index(staging(books, tmp_path), "train").split_dir
    try:
        wait_until(lambda: len(list(target.glob("*.tar"))) == len(index.shards) - 1, "all tars but one")
        wait_until(lambda: any(path.stat().st_size for path in target.glob("*.partial")), "half a tar")
        process.send_signal(signal.SIGKILL)
        process.wait(limit(30))
    finally:
        process.kill()
        process.communicate()
    assert not (target.parent / stage.WHOLE_NAME).exists()
    before = inodes(target)
    altered, untouched = sorted(before)[:2]
    (target / altered).chmod(0o644)
    flip(target / altered, 600)  # of the right size: without the mark that is not enough

    assert verify_dataset(fill(staging(books, tmp_path))) == []
    after = inodes(target)
    assert after[untouched] == before[untouched]
    assert after[altered] != before[altered]
    assert not list(target.glob("*.partial"))


def test_what_a_killed_copy_left_makes_room_for_the_next(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    with small_disk(tmp_path / "small", "size=4m") as small:
        data = DataConfig(path=str(books), stage="node", stage_dir=str(small))
        tars = sorted((copy := fill(data)).glob("train/*.tar"))
        (copy / stage.WHOLE_NAME).unlink()
        for tar in tars:
            tar.unlink()
        tars[0].with_name(f"{tars[0].name}.partial").write_bytes(bytes(shutil.disk_usage(small).free))
        assert verify_dataset(fill(data)) == []


def test_a_tar_that_somebody_cleans_away_in_mid_run_is_copied_again(books: Path, tmp_path: Path) -> None:
    """As programs do that delete from /tmp what has not been used for days."""
    index = open_index(staging(books, tmp_path), "train")
    fetch_shards(index)
    expected = read_tokens(open_index(DataConfig(path=str(books)), "train"), 3)
    entry = index.documents[3]
    (index.split_dir / entry.shard).unlink()
    assert (read_tokens(index, 3) == expected).all()


@pytest.mark.servers
def test_what_is_at_a_url_goes_through_the_cache_to_the_node(books: Path, tmp_path: Path) -> None:
    with closing(FileServer(books)) as server:
        data = staging(server.url, tmp_path, cache=tmp_path / "cache")
        refresh(data, ["train"])
        folder = fill(data)
        assert verify_dataset(folder) == []
        shutil.rmtree(folder)
        assert fill(data) == folder
        assert {count for name, count in server.asked.items() if name.endswith(".tar")} == {1}


def test_a_source_that_cannot_be_written_will_do(books: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        shutil.copytree(books, disk / "books")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert verify_dataset(fill(staging(disk / "books", tmp_path))) == []


def stage_rank(world: World, data: DataConfig, others: dict[int, DataConfig], patience: float = 20.0) -> str:
    """What a rank says when it copies; `others` are the ranks with data of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_SECONDS", patience)
        try:
            refresh_on_all_ranks(others.get(world.rank, data), ["train", "validation"])
        except RunError as error:
            return str(error)
    return ""


def test_a_damaged_source_is_refused_on_all_ranks_by_name(books: Path, tmp_path: Path, rank_pool: Pools) -> None:
    tar = sorted((books / "train").glob("*.tar"))[4]
    flip(tar, 700)
    data = staging(books, tmp_path)
    reported = rank_pool(2).run(stage_rank, data, {})
    assert all(f"{tar} has" in text and "but index.json says" in text for text in reported), reported
    assert not list(tmp_path.glob("node/*/*/whole.json"))
    flip(tar, 700)
    assert rank_pool(2).run(stage_rank, data, {}) == ["", ""]
    tar.unlink()
    shutil.rmtree(tmp_path / "node")
    reported = rank_pool(2).run(stage_rank, data, {})
    assert all(f"{tar} is missing: build (--overwrite) or copy it again" in text for text in reported), reported


def stopped_rank(world: World, data: DataConfig) -> tuple[str, str]:
    """What a rank of two raises whose copying waits for a disk, when a signal reaches rank 1."""

    def wait(path: Path, closed: threading.Event) -> Iterator[memoryview]:
        assert closed.wait(limit(60)), "nobody has ended the copying"
        yield from ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_SECONDS", 0.1)
        patch.setattr(stage, "_read_pieces", wait)
        patch.setattr(rounds, "received_signal", lambda: "SIGTERM" if world.rank else None)
        try:
            refresh_on_all_ranks(data, ["train"])
        except RunError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_a_signal_to_one_rank_ends_the_copying_of_all(books: Path, tmp_path: Path, rank_pool: Pools) -> None:
    (name, text), other = rank_pool(2).run(stopped_rank, staging(books, tmp_path))
    assert (name, text) == other
    assert name == "StoppedEarlyError" and "SIGTERM" in text


def test_what_is_no_file_is_not_copied(books: Path, tmp_path: Path, rank_pool: Pools) -> None:
    """A read of a pipe would wait for ever."""
    tar = min((books / "train").glob("*.tar"))
    tar.unlink()
    os.mkfifo(tar)
    reported = rank_pool(2).run(stage_rank, staging(books, tmp_path), {})
    assert all(str(tar) in text and "a pipe" in text for text in reported), reported


def test_a_full_node_stops_all_ranks_and_is_named(
    books: Path, tmp_path: Path, rank_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(shard.bytes for shard in open_index(DataConfig(path=str(books)), "train").shards)
    with small_disk(tmp_path / "small", f"size={stage.SPARE_BYTES}") as small:
        full = DataConfig(path=str(books), stage="node", stage_dir=str(small))
        reported = rank_pool(2).run(stage_rank, staging(books, tmp_path), {1: full})
        assert not list(small.rglob("*.tar"))
    for text in reported:
        assert f"node {socket.gethostname()}: {small}" in text
        assert f"needs {needed:,} bytes, but " in text and "free there" in text
        assert "set data.stage_dir to a larger disk, or data.stage to none" in text
    assert reported[0].startswith("copying ") and "failed on 1 of 2 ranks. rank 1: " in reported[0]


def test_a_disk_that_fills_up_meanwhile_is_reported_and_keeps_nothing_by_halves(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a quota does, which no look at the disk foretells."""
    monkeypatch.setattr(stage, "SPARE_BYTES", -(2**30))
    with small_disk(tmp_path / "small", "size=20k") as small:
        data = DataConfig(path=str(books), stage="node", stage_dir=str(small))
        with refused(FailedRemoteError, "data.stage_dir"):
            fill(data)
        assert not list(small.rglob("*.partial")) and not list(small.rglob("whole.json"))


@pytest.mark.servers
def test_ranks_wait_in_rounds_for_a_long_copy_and_end_with_the_first_that_fails(
    books: Path, tmp_path: Path, rank_pool: Pools
) -> None:
    with closing(FileServer(books)) as server:
        tars = [f"train/{path.name}" for path in (books / "train").glob("*.tar")]
        server.faults.update({name: ["slow"] for name in tars})
        data = staging(server.url, tmp_path, cache=tmp_path / "cache")
        assert rank_pool(2).run(stage_rank, data, {}, 0.1) == ["", ""]
        server.faults.update({name: ["silent"] for name in tars})
        other = tmp_path / "other"
        stuck = {0: staging(server.url, other, cache=other)}
        (tmp_path / "bad").write_text("a file where a folder should be")
        bad = replace(data, stage_dir=str(tmp_path / "bad"))
        reported = rank_pool(2).run(stage_rank, bad, stuck, 0.1)
        assert all(str(tmp_path / "bad") in text and "data.stage_dir" in text for text in reported), reported

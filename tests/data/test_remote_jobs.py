"""Whole commands on data at a URL: training to the same bits, a shard that cannot be had, check, evaluate, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.data.plan import make_plan
from dist_mem.data.shard import read_index
from dist_mem.evaluation import evaluate
from dist_mem.runtime.network_interface import free_port
from tests.support.file_server import FileServer
from tests.support.jobs import build_books, checkpoint_content, difference, losses, run_ranks, train_here, write_config
from tests.support.ranks import RankPool, launcher_environment

pytestmark = [pytest.mark.servers, pytest.mark.ranks]

LANES, SEG_LEN = 8, 16  # of jobs.write_config


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    """The books of jobs.py, each in a tar of its own."""
    found = FileServer(build_books(tmp_path, max_shard_bytes=1))
    yield found
    found.close()


def second_book(data: Path) -> tuple[str, int]:
    """The tar of a book that no lane begins with, and the steps before one opens it."""
    index = read_index(data / "train")
    lengths = [entry.num_tokens for entry in index.documents]
    plan = make_plan(lengths, num_lanes=LANES, seg_len=SEG_LEN, seed=0)
    lanes = [plan.documents(0, lane) for lane in range(LANES)]
    steps, number = min((-(-lengths[books[0]] // SEG_LEN), books[1]) for books in lanes if len(books) > 1)
    return index.documents[number].shard, steps


def test_a_job_stopped_by_a_missing_shard_ends_in_the_bits_of_a_local_one(
    server: FileServer, tmp_path: Path, rank_pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, step = second_book(server.root)
    remote_data = {"path": server.url, "cache": str(tmp_path / "cache")}
    changes = {"train": {"steps": step + 6}, "eval": {"every": step + 3}}
    local = write_config(tmp_path / "local.yaml", server.root, tmp_path / "runs" / "local", changes)
    remote = write_config(
        tmp_path / "remote.yaml", Path(), tmp_path / "runs" / "remote", changes, {"data": remote_data}
    )
    assert rank_pool(2).run(train_here, local) == [0, 0]

    server.faults[f"train/{missing}"] = [404]
    codes, text = run_ranks(["train", str(remote)], world_size=2, cwd=tmp_path)
    assert codes == [2, 2], text
    assert text.count(f"{server.url}/train/{missing}: HTTP status 404; check the address") == 1
    checkpoints = tmp_path / "runs" / "remote" / "checkpoints"
    assert (checkpoints / f"step-{step:08d}" / "manifest.json").exists()

    server.faults.clear()
    assert rank_pool(2).run(train_here, remote) == [0, 0]
    last = f"step-{step + 6:08d}"
    expected = checkpoint_content(tmp_path / "runs" / "local" / "checkpoints" / last)
    assert difference(checkpoint_content(checkpoints / last), expected) is None
    assert losses(tmp_path / "runs" / "remote") == losses(tmp_path / "runs" / "local")
    assert {count for name, count in server.asked.items() if name.endswith(".tar") and missing not in name} == {1}

    for name, value in launcher_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)  # else the evaluation here would set them, for all tests after it
    quiet = ["tracking.mlflow=false", "data.path=" + server.url]
    assert evaluate.run(tmp_path / "runs" / "local", split="test", overrides=[*quiet, f"data.cache={tmp_path}"]) == 0
    assert evaluate.run(tmp_path / "runs" / "remote", split="test", overrides=quiet) == 0
    first, second = (next(run.glob("evaluations/*.csv")).read_bytes() for run in (tmp_path / "runs").iterdir())
    assert first == second


def test_check_says_what_is_at_a_url(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [f"data.path={server.url}", f"data.cache={tmp_path / 'cache'}", "train.steps=1", "train.global_batch_size=8"]
    assert main(["train", "--check", *data]) == 0
    assert f"{server.url}, train: 12 documents" in capsys.readouterr().out
    server.faults["train/index.json"] = [404]
    assert main(["train", "--check", *data]) == 2
    assert capsys.readouterr().err.startswith(f"error: {server.url}/train/index.json: HTTP status 404")


def test_verify_fetches_and_looks_at_every_byte(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "verify", server.url, "--cache", str(tmp_path / "cache")]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{server.url}: all is well\n"
    damaged = next((server.root / "test").glob("*.tar"))
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)
    next(tmp_path.glob(f"cache/*/test/{damaged.name}")).unlink()
    assert main(command) == 1
    reported = capsys.readouterr().err
    assert reported.startswith(f"test/{damaged.name}: {server.url}/test/{damaged.name} has sha256 ")
    server.faults["train/index.json"] = [404]
    assert main([*command, "--split", "validation"]) == 0
    assert main([*command, "--split", "train"]) == 1

"""Faults of built data: whatever is cut, flipped, missing or foreign is named, and never read as if it were whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_mem.__main__ import main
from dist_mem.data.documents import Documents
from dist_mem.data.shard import ShardError, read_index, read_tokens, write_split
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.network_interface import free_port
from tests.support.faults import assert_says, flip
from tests.support.jobs import write_config
from tests.support.messages import described, refused, said, said_line
from tests.support.ranks import launcher_environment

TAR = "tiny-validation-00000.tar"
NUM_CUTS, NUM_FLIPS = 200, 300


@pytest.fixture
def data(books: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(books, tmp_path / "data"))


def read_all(split_dir: Path) -> list[list[int]]:
    """Every document as training reads it."""
    index = read_index(split_dir)
    documents = Documents(index, np.array([entry.num_tokens for entry in index.documents]), bos_id=256)
    return [documents.open(number).tokens.tolist() for number in range(len(documents))]


def test_a_tar_cut_anywhere_is_an_error_that_names_it(data: Path) -> None:
    tar = data / "validation" / TAR
    whole = tar.read_bytes()
    borders = [position + shift for position in range(0, len(whole), 512) for shift in (0, 1, 511)]
    random = np.random.default_rng(0).integers(0, len(whole), NUM_CUTS).tolist()
    for cut in {position for position in [*borders, *random] if position < len(whole)}:
        tar.write_bytes(whole[:cut])
        with pytest.raises(ShardError, match=rf"{TAR} has {cut} bytes, not the {len(whole)} of the index") as caught:
            read_all(tar.parent)
    said(described(caught.value), f"{cut} bytes")
    tar.unlink()
    with refused(ShardError, tar):
        read_all(tar.parent)


def test_a_byte_flipped_anywhere_in_a_tar_is_found_or_was_not_read(data: Path) -> None:
    """Reading takes tokens alone, by their checksum; `data verify` finds the rest (test_verify.py)."""
    tar = data / "validation" / TAR
    index, clean = read_index(tar.parent), read_all(tar.parent)
    spans = [(entry.tokens_offset, entry.tokens_offset + 2 * entry.num_tokens) for entry in index.documents]
    for position in np.random.default_rng(1).integers(0, tar.stat().st_size, NUM_FLIPS).tolist():
        flip(tar, position)
        if any(start <= position < stop for start, stop in spans):
            with pytest.raises(ShardError, match=TAR) as caught:
                read_all(tar.parent)
            assert_says(str(caught.value), "is damaged: its checksum does not match")
        else:
            assert read_all(tar.parent) == clean
        flip(tar, position)


def test_a_byte_flipped_in_index_or_tokenizer_is_found_or_changes_nothing(data: Path) -> None:
    index_path, tokenizer_path = data / "test" / "index.json", data / "tokenizer.json"
    clean = read_index(index_path.parent)
    for path in (index_path, index_path.with_name("documents.safetensors"), tokenizer_path):
        for position in range(0, path.stat().st_size, 11):
            flip(path, position)
            try:
                assert read_index(index_path.parent) == clean
                assert load_tokenizer(data).vocab_size == 257
            except ValueError as error:
                assert str(path) in str(error), position
            flip(path, position)


def edit_index(split_dir: Path, **changes: Any) -> None:
    """Write an index anew, as its builder would have."""
    path = split_dir / "index.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, **changes}))


def other_tokenizer(data: Path) -> None:
    index = read_index(data / "train")
    tokens = [read_tokens(index, number) for number in range(len(index.documents))]
    assert max(int(part.max()) for part in tokens) < 257
    shutil.rmtree(data / "train")
    write_split([], data / "train", name="tiny", split="train", tokenizer_fingerprint="0" * 64)


def empty_split(data: Path, split: str) -> None:
    fingerprint = load_tokenizer(data).fingerprint
    shutil.rmtree(data / split)
    write_split([], data / split, name="tiny", split=split, tokenizer_fingerprint=fingerprint)


AT_START = {
    "no index": (
        lambda data: (data / "train" / "index.json").unlink(),
        "train/index.json",
    ),
    "no tokenizer": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer.json"),
    "no data": (shutil.rmtree, "tokenizer.json"),
    "cut index": (
        lambda data: (data / "train" / "index.json").write_text('{"format_version": 1, "na'),
        "train/index.json",
    ),
    "newer index": (lambda data: edit_index(data / "train", format_version=99), "index.json has format_version 99"),
    "older index": (lambda data: edit_index(data / "train", format_version=1), "index.json has format_version 1"),
    "no documents": (lambda data: (data / "train" / "documents.safetensors").unlink(), "train/documents.safetensors"),
    "cut documents": (
        lambda data: os.truncate(data / "train" / "documents.safetensors", 100),
        "train/documents.safetensors",
    ),
    "other tokenizer": (other_tokenizer, "train"),
    "no validation split": (lambda data: shutil.rmtree(data / "validation"), "'validation'"),
    "empty validation split": (lambda data: empty_split(data, "validation"), "eval.split"),
}


@pytest.mark.parametrize("fault", AT_START)
def test_data_that_cannot_be_used_stops_a_run_before_it_begins(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for name, value in launcher_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    spoil, named = AT_START[fault]
    spoil(data)
    config = write_config(tmp_path / "c.yaml", data, tmp_path / "run", {"eval": {"every": 5}})
    assert main(["train", str(config)]) == 2
    error = capfd.readouterr().err
    said(f"exit code 2: {re.sub(f' {node_name()} +', ' <host> ', error[error.index('error: ') :])}", named)
    assert error.count("error: ") == 1
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_no_directory_is_the_users_and_a_failing_disk_is_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (data / "tokenizer.json" / "train", data / "nowhere"):
        with pytest.raises(ShardError, match=rf"{place}/index\.json .*data\.path"):
            read_index(place)
    index = read_index(data / "validation")

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(Path, "stat", fail)
    for read in (lambda: read_index(data / "train"), lambda: load_tokenizer(data), lambda: read_tokens(index, 0)):
        with refused(OSError):
            read()


def test_verify_tells_what_training_would_not_read(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(data / "validation" / TAR, 5)
    assert main(["data", "verify", str(data)]) == 1
    printed = capsys.readouterr()
    said_line(1, printed.out + printed.err, "byte 5,")
    assert len(verify_dataset(data)) == 1

"""A checkpoint is what its manifest says, to the last bit, or it is no checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dist_mem.checkpoint import manifest
from dist_mem.checkpoint.manifest import (
    FORMAT_VERSION,
    describe_file,
    files_in,
    newest_verified,
    read_manifest,
    step_dir,
    verify,
    write_manifest,
)
from dist_mem.errors import CheckpointError
from tests.support.faults import flip
from tests.support.messages import refused
from tests.support.saving import FACTS

LANES = "lanes/rank-00000.safetensors"


def make_checkpoint(run_dir: Path, step: int) -> Path:
    directory = step_dir(run_dir, step)
    (directory / "lanes").mkdir(parents=True)
    (directory / LANES).write_bytes(bytes(range(100)))
    (directory / "config.yaml").write_text("name: test\n")
    files = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    write_manifest(directory, {**FACTS, "step": step, "files": files})
    return directory


def test_newest_checkpoint_that_verifies_is_chosen(tmp_path: Path) -> None:
    assert newest_verified(tmp_path) == (None, [])
    older, newest = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 10)
    assert newest_verified(tmp_path) == (newest, [])
    for position in (0, 50, 99):
        flip(newest / LANES, position, 4)
        chosen, reasons = newest_verified(tmp_path)
        assert chosen == older
        assert f"{LANES}: SHA-256 differs" in reasons[0]
        flip(newest / LANES, position, 4)


def test_file_cut_short_and_file_missing_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, 5)
    os.truncate(directory / LANES, 40)
    with refused(CheckpointError, LANES):
        verify(directory)
    (directory / LANES).unlink()
    with refused(CheckpointError, LANES):
        verify(directory)
    (directory / "manifest.json").unlink()
    with refused(CheckpointError, "manifest.json"):
        newest_verified(tmp_path)


def test_newer_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr(manifest, "FORMAT_VERSION", FORMAT_VERSION + 1)
        directory = make_checkpoint(tmp_path, 5)
    with refused(CheckpointError, "format_version"):
        verify(directory)
    make_checkpoint(tmp_path, 3)
    with refused(CheckpointError, "dist_mem"):
        newest_verified(tmp_path)


def test_one_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    """Its steps and lanes exist nowhere else."""
    path = make_checkpoint(tmp_path, 5) / "manifest.json"
    clean = path.read_bytes()
    reported = json.loads(clean)
    for position in range(len(clean)):
        for bit in (1, 16):
            flip(path, position, bit)
            try:
                assert read_manifest(path.parent) == reported, position  # a blank that is another blank
            except CheckpointError as error:
                assert "damaged" in str(error) or "not readable" in str(error)
            path.write_bytes(clean)


def test_manifest_that_is_none_is_a_damaged_checkpoint_and_one_that_is_not_there_is_not_called_unfinished(
    tmp_path: Path,
) -> None:
    for text in ("{}", "[]", "{", "null"):
        (tmp_path / "manifest.json").write_text(text)
        with refused(CheckpointError, "manifest.json"):
            read_manifest(tmp_path)
    with refused(CheckpointError):
        read_manifest(tmp_path / "step-00000007")

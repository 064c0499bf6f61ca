"""Files that are damaged, or whose hashes fit and whose content is wrong, end in one kind of error that names them."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file as load_columns
from safetensors.torch import load_file, save_file

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import read_manifest, verify
from dist_mem.config import DataConfig
from dist_mem.data.directory import open_index, open_tokenizer
from dist_mem.data.index import fingerprint_of, write_index
from dist_mem.data.shard import read_mask, read_recall, read_tokens
from dist_mem.data.verify import verify_dataset
from dist_mem.errors import CheckpointError, UnusableError
from dist_mem.evaluation.trained_model import load_model, read_lanes
from tests.support import paths
from tests.support.damaged_json import places
from tests.support.faults import flip
from tests.support.messages import refused
from tests.support.saving import commit_small, newest_verified, rewrite_manifest

GOLDEN = paths.GOLDEN / "formats"
NUM_EDITS = 40  # of each file; the seeds are their numbers
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**40, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "7", "..", "../x", "a/b", "\n", "x" * 300, "0" * 64, "<u2", "train", "bytes", "words"),
    *([], [[]], [0], [0, 0, 1], ["x", 0], {}, {"x": 1}, {"": {}}),
]


def edited(tree: Any, random_source: random.Random) -> Any:
    """The tree with one or two things changed anywhere."""
    tree = copy.deepcopy(tree)
    for _ in range(random_source.choice([1, 1, 2])):
        container, key = random_source.choice(places(tree))
        match random_source.choice(["delete", "replace", "replace", "swap", "add", "nudge"]):
            case "delete":
                del container[key]
            case "replace":
                container[key] = copy.deepcopy(random_source.choice(VALUES))
            case "swap":
                other, name = random_source.choice(places(tree))
                container[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(container[key])
            case "add" if isinstance(container, dict):
                container[random_source.choice(["x", "", "9", "../x"])] = copy.deepcopy(random_source.choice(VALUES))
            case _:
                value = container[key]
                container[key] = value + random_source.choice([-1, 1, 1000]) if type(value) is int else [value]
    return tree


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "data", tmp_path / "data"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "checkpoints" / "step-00000003"
    return Path(shutil.copytree(GOLDEN / "format-4" / "step-00000003", directory))


def use_data(data: Path) -> None:
    settings = DataConfig(path=str(data))
    verify_dataset(data)
    open_tokenizer(settings)
    index = open_index(settings, "train")
    for number in range(len(index.documents)):
        for read in (read_tokens, read_mask, read_recall):
            read(index, number)
    assert index.num_words >= 0


def use_checkpoint(directory: Path) -> None:
    for action in ("list", "verify", "show"):
        try:
            main(["checkpoints", action, str(directory)])
        except SystemExit as ended:
            raise AssertionError(f"{action} ended with {ended.code}") from ended
    verify(directory)
    trained = load_model(directory, f"data.path={GOLDEN / 'data'}")
    read_lanes(trained, [0, 1, 2, 3])


def write(path: Path, body: Any) -> None:
    """Write a file with the hashes that it must have."""
    if path.name == "index.json" and isinstance(body, dict):
        body["fingerprint"] = fingerprint_of(body)
    if path.name == "manifest.json" and isinstance(body, dict):
        from dist_mem.checkpoint.manifest import _fingerprint

        body["sha256"] = _fingerprint(body)
    path.write_text(json.dumps(body))
    if path.name == "engine.json":
        rewrite_manifest(path.parent)


FILES: dict[str, Callable[[Path, Path], tuple[Path, Callable[[Path], None], Path]]] = {
    "index": lambda data, checkpoint: (data / "train" / "index.json", use_data, data),
    "tokenizer": lambda data, checkpoint: (data / "tokenizer.json", use_data, data),
    "manifest": lambda data, checkpoint: (checkpoint / "manifest.json", use_checkpoint, checkpoint),
    "engine": lambda data, checkpoint: (checkpoint / "engine.json", use_checkpoint, checkpoint),
}


def num_refused(
    use: Callable[[Path], None], root: Path, edit: Callable[[random.Random], None], *, number: int, named: Path
) -> int:
    """Nothing but errors of users comes of any edit; return how many of them name the file or folder."""
    refused, unhandled = 0, []
    for seed in range(number):
        edit(random.Random(seed))
        try:
            use(root)
        except UnusableError as error:
            refused += str(named) in str(error)
        except Exception as error:
            unhandled.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert unhandled == []
    return refused


@pytest.mark.parametrize("name", FILES)
def test_no_edit_with_valid_hashes_ends_in_another_error(data: Path, checkpoint: Path, name: str) -> None:
    path, use, root = FILES[name](data, checkpoint)
    clean = json.loads(path.read_text())

    def edit(draw: random.Random) -> None:
        write(path, edited(clean, draw))

    assert num_refused(use, root, edit, number=NUM_EDITS, named=root) > NUM_EDITS // 3
    write(path, clean)
    use(root)


def test_no_edit_of_the_columns_with_valid_hashes_ends_in_another_error(data: Path) -> None:
    path = data / "train" / "documents.safetensors"
    clean, head = load_columns(path), json.loads(path.with_name("index.json").read_text())

    def edit(draw: random.Random) -> None:
        columns = {name: column.copy() for name, column in clean.items()}
        column = columns[draw.choice(list(columns))].reshape(-1)
        limits = np.iinfo(column.dtype)
        nudged = int(column[0]) + draw.choice([-1, 1])
        value = draw.choice([limits.min, limits.max, 0, 1, 2**7, nudged])
        column[draw.randrange(len(column))] = min(max(value, limits.min), limits.max)
        write_index(data / "train", head, columns)

    assert num_refused(use_data, data, edit, number=5 * NUM_EDITS, named=path) > 2 * NUM_EDITS


DAMAGES = ["a row of another file", "no lane_ids", "another lane in a row", "a row that is not there", "two in one"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_are_not_the_lane_are_refused(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "ranks" / "rank-00000.safetensors"
    tensors, lanes = load_file(path), dict(read_manifest(checkpoint)["lanes"])
    if damage == "a row of another file":
        other = load_file(path.with_name("rank-00001.safetensors"))
        for key in (name for name in other if name.startswith("lanes/")):
            tensors[key][0] = other[key][0]
    elif damage == "no lane_ids":
        del tensors["lanes/lane_ids"]
    elif damage == "another lane in a row":
        lanes["0"], lanes["1"] = lanes["1"], lanes["0"]
    elif damage == "a row that is not there":
        lanes["0"] = [lanes["0"][0], 99]
    else:
        lanes["0"] = lanes["1"]
    save_file(tensors, path)
    rewrite_manifest(checkpoint, lanes=lanes)
    with refused(CheckpointError, checkpoint, " row"):
        read_lanes(load_model(checkpoint, f"data.path={GOLDEN / 'data'}"), [0])


@pytest.mark.parametrize("step", [4, 17, 0])
def test_a_step_that_is_not_that_of_its_folder_is_refused(checkpoint: Path, step: int) -> None:
    rewrite_manifest(checkpoint, step=step)
    with refused(CheckpointError, f"step is {step}", "step-00000003"):
        load_model(checkpoint.parent.parent, f"data.path={GOLDEN / 'data'}")
    renamed = checkpoint.rename(checkpoint.with_name("step-00000018"))
    with refused(CheckpointError, f"step is {step}", "step-00000018"):
        load_model(renamed, f"data.path={GOLDEN / 'data'}")
    assert read_manifest(renamed.rename(renamed.with_name("taken")))["step"] == step, "another name promises no step"


def test_files_that_are_shorter_longer_or_missing_are_named_with_what_may_have_happened(tmp_path: Path) -> None:
    directory = commit_small(tmp_path, 5)
    for size, reason in ((10, "cut short"), (20, "edited")):
        os.truncate(directory / "content", size)
        with refused(CheckpointError, "content", reason):
            verify(directory)
    (directory / "content").unlink()
    with refused(CheckpointError, "content"):
        verify(directory)
    (directory / "manifest.json").unlink()
    with refused(CheckpointError, "manifest.json"):
        newest_verified(tmp_path)


def test_one_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    """Its steps and lanes exist nowhere else."""
    path = commit_small(tmp_path, 5) / "manifest.json"
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
    with refused(CheckpointError, "step-00000007: there is no"):
        read_manifest(tmp_path / "step-00000007")

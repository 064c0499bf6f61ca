"""`verify_dataset` finds every kind of damage and names the documents it hits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dist_mem.data.index import fingerprint_of, write_index
from dist_mem.data.shard import TokenizedDocument, read_index, read_tokens, write_split
from dist_mem.data.tokenizers.registry import train_sentencepiece
from dist_mem.data.verify import Problem, verify_dataset
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from tests.support.faults import flip
from tests.support.messages import said

TAR = "tiny-train-00000.tar"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("intact")
    texts = ["one\n" * 30, "", "two and two\n" * 200, "three"]
    documents = [SourceDocument(f"d{number}", "title", text, recall=[]) for number, text in enumerate(texts)]
    build_dataset({"train": documents, "test": documents[:2]}, out, name="tiny", tokenizer_kind="bytes")
    return out


@pytest.fixture
def data_dir(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "data"))


def only_problem(data_dir: Path) -> Problem:
    (problem,) = verify_dataset(data_dir)
    return problem


def tar_of(data_dir: Path) -> Path:
    return data_dir / "train" / TAR


@pytest.mark.parametrize("cut", ["in a header", "at a member border", "in a payload", "in the last byte of a payload"])
def test_a_cut_tar_names_the_first_document_that_is_hit(data_dir: Path, cut: str) -> None:
    entry = read_index(data_dir / "train").documents[2]
    payload = entry.tokens_offset // 512 * 512
    place = {
        "in a header": payload - 300,
        "at a member border": payload - 512,
        "in a payload": entry.tokens_offset + 11,
        "in the last byte of a payload": entry.tokens_offset + 2 * entry.num_tokens - 1,
    }[cut]
    os.truncate(tar_of(data_dir), place)
    problem = only_problem(data_dir)
    assert (problem.where, problem.document) == (f"train/{TAR}", "d2")
    said(problem.message, f"{place:,}", "d2")


def cut_after(data_dir: Path) -> None:
    entry = read_index(data_dir / "train").documents[2]
    os.truncate(tar_of(data_dir), -(-(entry.tokens_offset + 2 * entry.num_tokens) // 512) * 512)


def without_splits(data_dir: Path) -> None:
    for split in ("train", "test"):
        shutil.rmtree(data_dir / split)


# What is done, and where the only problem is: the file, and the first document that is hit.
HARMS: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "cut between documents": (cut_after, f"train/{TAR}", "d3"),
    "cut end mark": (lambda data: os.truncate(tar_of(data), tar_of(data).stat().st_size - 512), f"train/{TAR}", None),
    "appended byte": (lambda data: tar_of(data).write_bytes(tar_of(data).read_bytes() + b"x"), f"train/{TAR}", None),
    "no tar": (lambda data: tar_of(data).unlink(), f"train/{TAR}", "d0"),
    "another tar": (
        lambda data: shutil.copy(tar_of(data), data / "train" / "a-train-0.tar"),
        "train/a-train-0.tar",
        None,
    ),
    "no index": (lambda data: (data / "train" / "index.json").unlink(), "train/index.json", None),
    "no tokenizer": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer.json", None),
    "no split": (without_splits, ".", None),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_missing_or_too_much_is_found_and_named(data_dir: Path, harm: str) -> None:
    assert verify_dataset(data_dir) == []
    spoil, where, document = HARMS[harm]
    spoil(data_dir)
    problem = only_problem(data_dir)
    assert (problem.where, problem.document) == (where, document)
    said(problem.message)


def test_a_flipped_byte_anywhere_names_its_document(data_dir: Path, intact: Path) -> None:
    index = read_index(intact / "train")
    ends = [entry.tokens_offset + 2 * entry.num_tokens for entry in index.documents]
    clean = (intact / "train" / TAR).read_bytes()
    for position in np.random.default_rng(0).integers(0, len(clean), 40).tolist():
        tar_of(data_dir).write_bytes(clean)
        flip(tar_of(data_dir), position, 0x10)
        problem = only_problem(data_dir)
        blocks = [-(-end // 512) * 512 for end in ends]
        expected = next((entry.id for entry, end in zip(index.documents, blocks, strict=True) if position < end), None)
        assert problem.document == expected, position


def test_a_flipped_token_is_reported_from_a_flipped_header(data_dir: Path) -> None:
    entry = read_index(data_dir / "train").documents[2]
    flip(tar_of(data_dir), entry.tokens_offset)
    assert "tokens (or mask, or recall) are altered" in only_problem(data_dir).message
    flip(tar_of(data_dir), entry.tokens_offset)
    flip(tar_of(data_dir), entry.tokens_offset - 100)
    assert f"byte {entry.tokens_offset - 100:,}, around its tokens, is altered" in only_problem(data_dir).message


def test_files_that_a_mac_puts_beside_every_file_are_no_problem(data_dir: Path) -> None:
    for path in [path for path in data_dir.rglob("*") if path.is_file()]:
        for folder in (path.parent, data_dir / "__MACOSX"):
            folder.mkdir(exist_ok=True)
            (folder / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    (data_dir / ".Trash-1000").mkdir()
    shutil.copy(next(data_dir.glob("*/index.json")), data_dir / ".Trash-1000")
    assert verify_dataset(data_dir) == []


def test_a_wrong_tokenizer_is_found_in_every_split(data_dir: Path) -> None:
    other = train_sentencepiece(["a b c d e f g h i j k l m n o"], data_dir, vocab_size=290)
    problems = verify_dataset(data_dir)
    assert [problem.where for problem in problems] == ["test/index.json", "train/index.json"]
    assert all(other.fingerprint[:12] in problem.message for problem in problems)


GARBAGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "random bytes": lambda tokens: np.random.default_rng(0).integers(0, 256, len(tokens)),
    "another text": lambda tokens: np.full(len(tokens), ord("a")),
    "no token": lambda tokens: np.full(len(tokens), 60_000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_with_fitting_hashes_is_found(data_dir: Path, kind: str) -> None:
    """Tar, arrays and index are what somebody wrote; the text is not what the index describes."""
    old = read_index(data_dir / "train")
    texts = [read_tokens(old, number) for number in range(len(old.documents))]
    documents = [
        TokenizedDocument(
            **{key: getattr(entry, key) for key in ("id", "title", "year", "words", "bytes")},
            tokens=np.array(GARBAGE[kind](tokens) if entry.id == "d2" else tokens, np.uint16),
        )
        for entry, tokens in zip(old.documents, texts, strict=True)
    ]
    names = {"name": "tiny", "split": "train", "tokenizer_fingerprint": old.tokenizer_fingerprint}
    write_split(documents, data_dir / "train", **names)
    problem = only_problem(data_dir)
    assert (problem.where, problem.document) == (f"train/{TAR}", "d2")
    said(problem.message)


def test_an_id_that_comes_twice_is_found(data_dir: Path) -> None:
    split_dir = data_dir / "train"
    columns = load_file(split_dir / "documents.safetensors")
    columns["id_text"][:] = np.tile(columns["id_text"][:2], 4)  # "d0", the first of four ids
    write_index(split_dir, json.loads((split_dir / "index.json").read_text()), columns)
    assert Problem("train/documents.safetensors", "d0", "comes 4 times: build (--overwrite) the data again") in (
        verify_dataset(data_dir)
    )


def test_arrays_that_are_not_those_of_the_index_are_found(data_dir: Path) -> None:
    """The tar is altered, and its checksum in the index with it."""
    path = data_dir / "train" / "index.json"
    flip(tar_of(data_dir), read_index(data_dir / "train").documents[2].tokens_offset)
    body = json.loads(path.read_text())
    body["shards"][0]["sha256"] = hashlib.sha256(tar_of(data_dir).read_bytes()).hexdigest()
    body["fingerprint"] = fingerprint_of(body)
    path.write_text(json.dumps(body))
    problem = only_problem(data_dir)
    assert problem.document == "d2"
    assert "are not those of index.json, although the tar is" in problem.message

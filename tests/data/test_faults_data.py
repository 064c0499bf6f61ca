"""Faults of built data: whatever is cut, flipped, missing or foreign is named, and never read as if it were whole."""

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dist_mem.__main__ import main
from dist_mem.data.documents import Documents
from dist_mem.data.index import fingerprint_of, write_index
from dist_mem.data.shard import ShardError, TokenizedDocument, read_index, read_tokens, write_split
from dist_mem.data.tokenizers.registry import load_tokenizer, train_sentencepiece
from dist_mem.data.verify import ShardProblem, verify_dataset
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.runtime.network_interface import free_port
from tests.support.faults import as_folder, as_pipe, assert_says, flip
from tests.support.jobs import write_config
from tests.support.messages import described, refused, said
from tests.support.ranks import launcher_environment

TAR, TRAIN_TAR = "tiny-validation-00000.tar", "train/tiny-train-00000.tar"


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
    for cut in [*range(0, len(whole), 97), *range(0, len(whole), 512), len(whole) - 1]:
        tar.write_bytes(whole[:cut])
        with pytest.raises(ShardError, match=rf"{TAR} has {cut} bytes, not the {len(whole)} of the index") as caught:
            read_all(tar.parent)
    said(described(caught.value), f"{cut} bytes")
    tar.unlink()
    with refused(ShardError, tar):
        read_all(tar.parent)


def test_a_byte_flipped_anywhere_in_a_tar_is_found_or_was_not_read(data: Path) -> None:
    """Reading takes tokens alone, by their checksum; `data verify` finds the rest."""
    tar = data / "validation" / TAR
    index, clean = read_index(tar.parent), read_all(tar.parent)
    spans = [(entry.tokens_offset, entry.tokens_offset + 2 * entry.num_tokens) for entry in index.documents]
    for position in np.random.default_rng(1).integers(0, tar.stat().st_size, 300).tolist():
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


def empty_split(split_dir: Path, fingerprint: str) -> None:
    for record in split_dir.parent.glob("*/build.json"):
        record.unlink()  # else it would say that the split is of another build
    shutil.rmtree(split_dir)
    write_split([], split_dir, name="tiny", split=split_dir.name, tokenizer_fingerprint=fingerprint)


AT_START = {
    "no index": (lambda data: (data / "train" / "index.json").unlink(), "train/index.json"),
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
    "other tokenizer": (lambda data: empty_split(data / "train", "0" * 64), "train"),
    "no validation split": (lambda data: shutil.rmtree(data / "validation"), "'validation'"),
    "empty validation split": (
        lambda data: empty_split(data / "validation", load_tokenizer(data).fingerprint),
        "eval.split",
    ),
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
    said(error, "error: ", named)
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

    monkeypatch.setattr(os, "open", fail)
    for read in (lambda: read_index(data / "train"), lambda: load_tokenizer(data), lambda: read_tokens(index, 0)):
        with refused(OSError, "[Errno 5]", data):
            read()


# `verify_dataset` finds every kind of damage and names the documents it hits.


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("intact")
    texts = ["one\n" * 30, "", "two and two\n" * 200, "three"]
    documents = [SourceDocument(f"d{number}", "title", text, recall=[]) for number, text in enumerate(texts)]
    build_dataset({"train": documents, "test": documents[:2]}, out, name="tiny", tokenizer_kind="bytes")
    return out


@pytest.fixture
def tiny(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "data"))


def only_problem(tiny: Path) -> ShardProblem:
    (problem,) = verify_dataset(tiny)
    return problem


def cut_at(place: Callable[[int], int]) -> Callable[[Path], None]:
    """Cut the tar where it follows from the end of d2's tokens."""

    def cut(tiny: Path) -> None:
        entry = read_index(tiny / "train").documents[2]
        os.truncate(tiny / TRAIN_TAR, place(entry.tokens_offset + 2 * entry.num_tokens))

    return cut


def without_splits(tiny: Path) -> None:
    for split in ("train", "test"):
        shutil.rmtree(tiny / split)


def of_another_split(tiny: Path) -> None:
    """Name another split in an index, with the right fingerprint."""
    path = tiny / "train" / "index.json"
    body = {**json.loads(path.read_text()), "split": "abc"}
    path.write_text(json.dumps({**body, "fingerprint": fingerprint_of(body)}))


# What is done, and the only problem: its file, the first document that is hit, and what is said.
HARMS: dict[str, tuple[Callable[[Path], object], str, str | None, str]] = {
    "cut in the last byte of a payload": (cut_at(lambda end: end - 1), TRAIN_TAR, "d2", "2 documents from d2 on cut"),
    "cut between documents": (cut_at(lambda end: -(-end // 512) * 512), TRAIN_TAR, "d3", "1 document from d3 on cut"),
    "cut end mark": (
        lambda data: os.truncate(data / TRAIN_TAR, (data / TRAIN_TAR).stat().st_size - 512),
        TRAIN_TAR,
        None,
        "only the end mark is",
    ),
    "appended byte": (
        lambda data: (data / TRAIN_TAR).write_bytes((data / TRAIN_TAR).read_bytes() + b"x"),
        TRAIN_TAR,
        None,
        "1 byte longer",
    ),
    "no tar": (lambda data: (data / TRAIN_TAR).unlink(), TRAIN_TAR, "d0", "missing, with 4 documents"),
    "another tar": (
        lambda data: shutil.copy(data / TRAIN_TAR, data / "train/a-0.tar"),
        "train/a-0.tar",
        None,
        "not in index.json",
    ),
    "no index": (lambda data: (data / "train" / "index.json").unlink(), "train/index.json", None, "is missing"),
    "no tokenizer": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer.json", None, "is missing"),
    "no split": (without_splits, "", None, "no split"),
    "index of another split": (of_another_split, "train/index.json", None, "split 'abc'"),
    "pipe as a tar": (lambda data: as_pipe(data / TRAIN_TAR, random.Random()), TRAIN_TAR, None, "a pipe"),
    "folder as a tar": (lambda data: as_folder(data / TRAIN_TAR, random.Random()), TRAIN_TAR, None, "a folder"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_missing_or_too_much_is_found_and_named(tiny: Path, harm: str) -> None:
    assert verify_dataset(tiny) == []
    spoil, where, document, named = HARMS[harm]
    spoil(tiny)
    problem = only_problem(tiny)
    assert (problem.where, problem.document) == (where, document)
    said(problem.message, named)


def test_a_flipped_byte_anywhere_names_its_document(tiny: Path, intact: Path) -> None:
    index = read_index(intact / "train")
    ends = [entry.tokens_offset + 2 * entry.num_tokens for entry in index.documents]
    clean = (intact / TRAIN_TAR).read_bytes()
    for position in np.random.default_rng(0).integers(0, len(clean), 40).tolist():
        (tiny / TRAIN_TAR).write_bytes(clean)
        flip(tiny / TRAIN_TAR, position, 0x10)
        problem = only_problem(tiny)
        blocks = [-(-end // 512) * 512 for end in ends]
        expected = next((entry.id for entry, end in zip(index.documents, blocks, strict=True) if position < end), None)
        assert problem.document == expected, position


def test_a_flipped_token_is_reported_from_a_flipped_header(tiny: Path) -> None:
    entry = read_index(tiny / "train").documents[2]
    flip(tiny / TRAIN_TAR, entry.tokens_offset)
    assert "tokens (or mask, or recall) are altered" in only_problem(tiny).message
    flip(tiny / TRAIN_TAR, entry.tokens_offset)
    flip(tiny / TRAIN_TAR, entry.tokens_offset - 100)
    assert f"byte {entry.tokens_offset - 100:,}, around its tokens, is altered" in only_problem(tiny).message


def test_files_that_a_mac_puts_beside_every_file_are_no_problem(tiny: Path) -> None:
    for path in [path for path in tiny.rglob("*") if path.is_file()]:
        for folder in (path.parent, tiny / "__MACOSX"):
            folder.mkdir(exist_ok=True)
            (folder / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    (tiny / ".Trash-1000").mkdir()
    shutil.copy(next(tiny.glob("*/index.json")), tiny / ".Trash-1000")
    assert verify_dataset(tiny) == []


def test_a_wrong_tokenizer_is_found_in_every_split(tiny: Path) -> None:
    other = train_sentencepiece(["a b c d e f g h i j k l m n o"], tiny, vocab_size=290)
    problems = verify_dataset(tiny)
    assert [problem.where for problem in problems] == ["test/index.json", "train/index.json"]
    assert all(other.fingerprint[:12] in problem.message for problem in problems)


GARBAGE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "random bytes": (lambda tokens: np.random.default_rng(0).integers(0, 256, len(tokens)), "no UTF-8"),
    "another text": (lambda tokens: np.full(len(tokens), ord("a")), "bytes in 1 words"),
    "no token": (lambda tokens: np.full(len(tokens), 60_000), "token 60000"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_with_fitting_hashes_is_found(tiny: Path, kind: str) -> None:
    """Tar, arrays and index are what somebody wrote; the text is not what the index describes."""
    make, named = GARBAGE[kind]
    old = read_index(tiny / "train")
    texts = [read_tokens(old, number) for number in range(len(old.documents))]
    documents = [
        TokenizedDocument(
            **{key: getattr(entry, key) for key in ("id", "title", "year", "words", "bytes")},
            tokens=np.array(make(tokens) if entry.id == "d2" else tokens, np.uint16),
        )
        for entry, tokens in zip(old.documents, texts, strict=True)
    ]
    names = {"name": "tiny", "split": "train", "tokenizer_fingerprint": old.tokenizer_fingerprint}
    (tiny / "test" / "build.json").unlink()  # the new split has none
    write_split(documents, tiny / "train", **names)
    problem = only_problem(tiny)
    assert (problem.where, problem.document) == (TRAIN_TAR, "d2")
    said(problem.message, named)


def test_an_id_that_comes_twice_is_found(tiny: Path) -> None:
    split_dir = tiny / "train"
    columns = load_file(split_dir / "documents.safetensors")
    columns["id_text"][:] = np.tile(columns["id_text"][:2], 4)  # "d0", the first of four ids
    write_index(split_dir, json.loads((split_dir / "index.json").read_text()), columns)
    assert ShardProblem("train/documents.safetensors", "d0", "comes 4 times: build (--overwrite) the data again") in (
        verify_dataset(tiny)
    )


def test_arrays_that_are_not_those_of_the_index_are_found(tiny: Path) -> None:
    """The tar is altered, and its checksum in the index with it."""
    (tiny / "train" / "build.json").unlink()
    (tiny / "test" / "build.json").unlink()
    path = tiny / "train" / "index.json"
    flip(tiny / TRAIN_TAR, read_index(tiny / "train").documents[2].tokens_offset)
    body = json.loads(path.read_text())
    body["shards"][0]["sha256"] = hashlib.sha256((tiny / TRAIN_TAR).read_bytes()).hexdigest()
    body["fingerprint"] = fingerprint_of(body)
    path.write_text(json.dumps(body))
    problem = only_problem(tiny)
    assert problem.document == "d2"
    assert "are not those of index.json, although the tar is" in problem.message

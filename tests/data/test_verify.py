"""`verify_dataset` finds every kind of damage and names the documents it hits."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dist_mem.data.index import fingerprint_of, write_index
from dist_mem.data.shard import TokenizedDocument, read_index, read_tokens, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import load_tokenizer, save_tokenizer, train_sentencepiece
from dist_mem.data.verify import Problem, verify_dataset
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument

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


def truncate(data_dir: Path, num_bytes: int) -> None:
    tar = data_dir / "train" / TAR
    tar.write_bytes(tar.read_bytes()[:num_bytes])


def flip(data_dir: Path, position: int) -> None:
    tar = data_dir / "train" / TAR
    content = bytearray(tar.read_bytes())
    content[position] ^= 0x10
    tar.write_bytes(content)


def test_an_intact_dataset_has_no_problem(data_dir: Path) -> None:
    assert verify_dataset(data_dir) == []


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
    truncate(data_dir, place)
    problem = only_problem(data_dir)
    assert (problem.where, problem.document) == (f"train/{TAR}", "d2")
    assert f"cut at byte {place:,}" in problem.message
    assert "2 documents from d2 on cut or missing" in problem.message


def test_a_cut_between_documents_names_the_first_missing_one(data_dir: Path) -> None:
    entry = read_index(data_dir / "train").documents[2]
    truncate(data_dir, -(-(entry.tokens_offset + 2 * entry.num_tokens) // 512) * 512)
    assert only_problem(data_dir).document == "d3"


def test_a_cut_end_mark_is_found_though_no_document_is_hit(data_dir: Path) -> None:
    truncate(data_dir, -512)
    problem = only_problem(data_dir)
    assert problem.document is None
    assert "no document is hit" in problem.message


def test_a_flipped_byte_anywhere_names_its_document(data_dir: Path, intact: Path) -> None:
    index = read_index(intact / "train")
    ends = [entry.tokens_offset + 2 * entry.num_tokens for entry in index.documents]
    clean = (intact / "train" / TAR).read_bytes()
    for position in np.random.default_rng(0).integers(0, len(clean), 40).tolist():
        (data_dir / "train" / TAR).write_bytes(clean)
        flip(data_dir, position)
        problem = only_problem(data_dir)
        blocks = [-(-end // 512) * 512 for end in ends]
        expected = next((entry.id for entry, end in zip(index.documents, blocks, strict=True) if position < end), None)
        assert problem.document == expected, position


def test_a_flipped_token_is_reported_from_a_flipped_header(data_dir: Path) -> None:
    entry = read_index(data_dir / "train").documents[2]
    flip(data_dir, entry.tokens_offset)
    assert "tokens (or mask, or recall) are altered" in only_problem(data_dir).message
    flip(data_dir, entry.tokens_offset)
    flip(data_dir, entry.tokens_offset - 100)
    assert f"byte {entry.tokens_offset - 100:,}, around its tokens, is altered" in only_problem(data_dir).message


def test_appended_bytes_are_found(data_dir: Path) -> None:
    tar = data_dir / "train" / TAR
    tar.write_bytes(tar.read_bytes() + b"x")
    assert "1 byte longer" in only_problem(data_dir).message


def test_a_missing_tar_names_its_documents(data_dir: Path) -> None:
    (data_dir / "train" / TAR).unlink()
    problem = only_problem(data_dir)
    assert problem.document == "d0"
    assert "missing, with 4 documents from d0 on" in problem.message


def test_a_tar_of_another_build_is_found(data_dir: Path) -> None:
    shutil.copy(data_dir / "train" / TAR, data_dir / "train" / "other-train-00000.tar")
    assert only_problem(data_dir).where == "train/other-train-00000.tar"


def test_files_that_a_mac_puts_beside_every_file_are_no_problem(data_dir: Path) -> None:
    for path in [path for path in data_dir.rglob("*") if path.is_file()]:
        for folder in (path.parent, data_dir / "__MACOSX"):
            folder.mkdir(exist_ok=True)
            (folder / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    (data_dir / ".Trash-1000").mkdir()
    shutil.copy(next(data_dir.glob("*/index.json")), data_dir / ".Trash-1000")
    assert verify_dataset(data_dir) == []


def test_a_missing_index_is_found(data_dir: Path) -> None:
    (data_dir / "train" / "index.json").unlink()
    problem = only_problem(data_dir)
    assert problem.where == "train/index.json"
    assert "is missing" in problem.message


def test_a_wrong_tokenizer_is_found_in_every_split(data_dir: Path) -> None:
    other = train_sentencepiece(["a b c d e f g h i j k l m n o"], data_dir, vocab_size=290)
    problems = verify_dataset(data_dir)
    assert [problem.where for problem in problems] == ["test/index.json", "train/index.json"]
    assert all(other.fingerprint[:12] in problem.message for problem in problems)


def test_a_missing_tokenizer_is_found(data_dir: Path) -> None:
    (data_dir / "tokenizer.json").unlink()
    assert only_problem(data_dir).where == "tokenizer.json"


def test_a_folder_without_splits_is_no_dataset(tmp_path: Path, intact: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(intact)
    save_tokenizer(tokenizer, tmp_path)
    assert "no split" in only_problem(tmp_path).message


GARBAGE = {
    "random bytes": (lambda tokens: np.random.default_rng(0).integers(0, 256, len(tokens)), "no UTF-8"),
    "another text": (lambda tokens: np.full(len(tokens), ord("a")), "its text has"),
    "no token": (lambda tokens: np.full(len(tokens), 60_000), "token 60000 is not among the 257 of its tokenizer"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_with_fitting_hashes_is_found(data_dir: Path, kind: str) -> None:
    """Tar, arrays and index are what somebody wrote; the text is not what the index describes."""
    make, message = GARBAGE[kind]
    old = read_index(data_dir / "train")
    texts = [read_tokens(old, number) for number in range(len(old.documents))]
    documents = [
        TokenizedDocument(
            **{key: getattr(entry, key) for key in ("id", "title", "year", "words", "bytes")},
            tokens=np.array(make(tokens) if entry.id == "d2" else tokens, np.uint16),
        )
        for entry, tokens in zip(old.documents, texts, strict=True)
    ]
    names = {"name": "tiny", "split": "train", "tokenizer_fingerprint": old.tokenizer_fingerprint}
    write_split(documents, data_dir / "train", **names)
    problem = only_problem(data_dir)
    assert (problem.where, problem.document) == (f"train/{TAR}", "d2")
    assert message in problem.message


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
    flip(data_dir, read_index(data_dir / "train").documents[2].tokens_offset)
    body = json.loads(path.read_text())
    body["shards"][0]["sha256"] = hashlib.sha256((data_dir / "train" / TAR).read_bytes()).hexdigest()
    body["fingerprint"] = fingerprint_of(body)
    path.write_text(json.dumps(body))
    problem = only_problem(data_dir)
    assert problem.document == "d2"
    assert "are not those of index.json, although the tar is" in problem.message

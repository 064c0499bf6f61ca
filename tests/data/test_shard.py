"""Shards: what is written is what is read, in place, by us and by a bare webdataset."""

from __future__ import annotations

import gc
import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.data.shard import (
    Index,
    ShardError,
    TokenizedDocument,
    check_document,
    read_index,
    read_mask,
    read_recall,
    read_tokens,
    write_split,
)
from tests.support.messages import refused

LENGTHS = [40, 0, 1, 300, 7, 1000, 2]
SHARD_BYTES = 1186  # what the arrays of the first four documents below take; makes three tars


def make_documents(dtype: type = np.uint16) -> list[TokenizedDocument]:
    """Seven documents, one empty; some with a mask, some with recall distances, one with a title that is not ASCII."""
    draw = np.random.default_rng(0)
    return [
        TokenizedDocument(
            id=f"{number}0",
            title=f"Le {number}\u1d49 livre, \u201cd'or\u201d",
            year=None if number == 2 else 1800 + number,
            words=length // 2,
            bytes=3 * length,
            tokens=draw.integers(0, 60_000, length).astype(dtype),
            mask=draw.random(length) < 0.5 if number % 3 == 0 else None,
            recall=draw.integers(0, 50, length).astype(np.int32) if number % 2 == 0 else None,
        )
        for number, length in enumerate(LENGTHS)
    ]


def write(documents: list[TokenizedDocument], folder: Path, **options: Any) -> Index:
    return write_split(documents, folder, name="tiny", split="train", tokenizer_fingerprint="f", **options)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("max_shard_bytes", [1, SHARD_BYTES, 2**20])
def test_reads_in_place_equal_what_was_written(tmp_path: Path, dtype: type, max_shard_bytes: int) -> None:
    documents = make_documents(dtype)
    index = write(documents, tmp_path, max_shard_bytes=max_shard_bytes)
    for number, document in enumerate(documents):
        tokens = read_tokens(index, number)
        assert tokens.dtype == dtype
        assert not tokens.flags.writeable
        assert np.array_equal(tokens, document.tokens)
        for read, expected in ((read_mask, document.mask), (read_recall, document.recall)):
            found = read(index, number)
            assert (found is None) == (expected is None)
            assert found is None or found.tolist() == expected.tolist()  # type: ignore[union-attr]
        check_document(index, number)


@settings(max_examples=60, deadline=None)
@given(document=st.integers(0, len(LENGTHS) - 1), start=st.integers(0, 1100), length=st.integers(0, 1100))
def test_any_range_of_a_document_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, document: int, start: int, length: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ranges"
    documents = make_documents()
    index = read_index(folder) if folder.exists() else write(documents, folder)
    expected = documents[document].tokens[start : start + length]
    assert np.array_equal(read_tokens(index, document, start, start + length), expected)


def test_shards_are_cut_where_they_reach_their_size(tmp_path: Path) -> None:
    documents = make_documents()
    assert len(write(documents, tmp_path / "one").shards) == 1
    assert len(write(documents, tmp_path / "each", max_shard_bytes=1).shards) == len(LENGTHS) - 1  # 0 bytes close none
    index = write(documents, tmp_path / "some", max_shard_bytes=SHARD_BYTES)
    assert [entry.shard[-9:] for entry in index.documents] == ["00000.tar"] * 4 + ["00001.tar"] * 2 + ["00002.tar"]


def test_a_split_without_documents_is_an_index_without_tars(tmp_path: Path) -> None:
    index = write([], tmp_path)
    assert (index.documents, index.shards, index.num_tokens) == ([], [], 0)


def test_a_bare_webdataset_reads_the_tars(tmp_path: Path) -> None:
    documents = make_documents()
    index = write(documents, tmp_path, max_shard_bytes=SHARD_BYTES)
    urls = [str(tmp_path / shard.name) for shard in index.shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves closing its tars to the garbage collector
        samples = list(webdataset.WebDataset(urls, shardshuffle=False))
        gc.collect()
    assert [sample["__key__"] for sample in samples] == [document.id for document in documents]
    for sample, document, entry in zip(samples, documents, index.documents, strict=True):
        assert np.array_equal(np.load(io.BytesIO(sample["tokens.npy"])), document.tokens)
        assert ("mask.npy" in sample, "recall.npy" in sample) == (
            document.mask is not None,
            document.recall is not None,
        )
        assert json.loads(sample["json"]) == {
            "id": document.id,
            "title": document.title,
            "year": document.year,
            "words": document.words,
            "bytes": document.bytes,
            "tokens": len(document.tokens),
            "sha256": entry.sha256,
        }


def test_writing_again_gives_the_same_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    first = write(make_documents(), tmp_path / "a", max_shard_bytes=SHARD_BYTES)
    write(make_documents(), tmp_path / "b", max_shard_bytes=1)  # more tars, which the next call replaces
    second = write(make_documents(), tmp_path / "b", max_shard_bytes=SHARD_BYTES)
    assert first.fingerprint == second.fingerprint
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_totals_count_every_document_and_official_words_come_first(tmp_path: Path) -> None:
    index, num_words = write(make_documents(), tmp_path), sum(length // 2 for length in LENGTHS)
    assert (index.num_tokens, index.num_bytes) == (sum(LENGTHS), 3 * sum(LENGTHS))
    assert index.num_words == index.counted_words == num_words
    index = write(make_documents(), tmp_path, official_words=12_345)
    assert read_index(tmp_path) == index and (index.num_words, index.counted_words) == (12_345, num_words)


def test_the_index_tells_datasets_apart(tmp_path: Path) -> None:
    documents = make_documents()
    renamed = [replace(documents[0], title="another"), *documents[1:]]
    assert write(documents, tmp_path / "a").fingerprint != write(renamed, tmp_path / "b").fingerprint


@pytest.mark.parametrize("name", ["", "10.5", "a/b", "a\\b", "a\nb", "caf\u00e9", "x" * 81])
def test_ids_that_a_tar_cannot_carry_are_refused(tmp_path: Path, name: str) -> None:
    with refused(ValueError):
        write([replace(make_documents()[0], id=name)], tmp_path)
    longest = replace(make_documents()[0], id="x" * 80)
    assert np.array_equal(read_tokens(write([longest], tmp_path), 0), longest.tokens)


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong = {"tokens": np.zeros(40, np.int64), "mask": np.zeros(39, bool), "recall": np.zeros(41, np.int32)}
    for name, array in wrong.items():
        with refused(ValueError, "document 00", name):
            write([replace(make_documents()[0], **{name: array})], tmp_path)  # type: ignore[arg-type]


def test_an_id_that_comes_twice_is_refused_and_an_interrupted_rewrite_leaves_no_index(tmp_path: Path) -> None:
    write(make_documents(), tmp_path)
    with refused(ValueError):
        write(make_documents()[:1] * 2, tmp_path)
    with refused(ShardError, "index.json"):
        read_index(tmp_path)


@pytest.mark.parametrize("kind", ["tokens", "mask", "recall"])
def test_a_flipped_bit_in_any_array_is_found_by_its_document(tmp_path: Path, kind: str) -> None:
    index = write(make_documents(), tmp_path)
    tar = tmp_path / "tiny-train-00000.tar"
    content = bytearray(tar.read_bytes())
    content[getattr(index.documents[0], f"{kind}_offset") + 5] ^= 1
    tar.write_bytes(content)
    with refused(ShardError):
        check_document(read_index(tmp_path), 0)
    check_document(read_index(tmp_path), 3)

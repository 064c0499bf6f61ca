"""Shards and their index: what is written is what is read, in place, and what is not as it was written is refused."""

import gc
import hashlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dist_mem.data import shard
from dist_mem.data.index import DOCUMENTS_NAME, INDEX_NAME, MAX_INDEX_BYTES, fingerprint_of, write_index
from dist_mem.data.plan import DocumentPlan
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
from tests.support.faults import flip
from tests.support.lane_corpus import make_split
from tests.support.messages import refused
from tests.support.small_builds import contents

LENGTHS = [40, 0, 1, 300, 7, 1000, 2]
SHARD_BYTES = 1186  # what the arrays of the first four documents below take; makes three tars


def make_documents(dtype: type = np.uint16) -> list[TokenizedDocument]:
    """Seven documents, one empty; some with a mask, some with recall distances, one with a title that is not ASCII."""
    draw = np.random.default_rng(0)
    return [
        TokenizedDocument(
            id=f"{number}0",
            title=f"Le {number}\u1d49 livre, \u201cd'or\u201d",
            year=None if number == 2 else 1000 * number - 500,
            words=length // 2,
            bytes=3 * length,
            tokens=draw.integers(0, 60_000, length).astype(dtype),
            mask=draw.random(length) < 0.5 if number % 3 == 0 else None,
            recall=draw.integers(0, 50, length).astype(np.int32) if number % 2 == 0 else None,
        )
        for number, length in enumerate(LENGTHS)
    ]


def write(documents: list[TokenizedDocument], folder: Path, *, name: str = "tiny", **options: Any) -> Index:
    return write_split(documents, folder, name=name, split="train", tokenizer_fingerprint="f", **options)


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


def test_a_split_of_many_tars_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_MAPS", 2)
    documents = [one for one in make_documents() if len(one.tokens)]
    index = write(documents, tmp_path, max_shard_bytes=1)
    first = read_tokens(index, 0)
    for number in [*range(len(documents)), *reversed(range(len(documents)))]:
        check_document(index, number)
        opened = [link for link in Path("/proc/self/fd").iterdir() if tmp_path in link.resolve().parents]
        assert len([link for link in opened if link.resolve().suffix == ".tar"]) <= 2 + 1  # and that of `first`
    assert np.array_equal(first, documents[0].tokens)


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
    renamed = [replace(make_documents()[0], title="another"), *make_documents()[1:]]
    other = write(renamed, tmp_path / "c", max_shard_bytes=SHARD_BYTES)
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_name_is_no_pattern_of_others(tmp_path: Path) -> None:
    for name in ("b[1]", "tin?"):
        write(make_documents()[:2], tmp_path / name, max_shard_bytes=1)
        write(make_documents(), tmp_path / name, name=name, max_shard_bytes=1)
        index = write(make_documents(), tmp_path / name, name=name, max_shard_bytes=SHARD_BYTES)
        found = {path.name for path in (tmp_path / name).glob("*.tar")} - {shard.name for shard in index.shards}
        assert sorted(found) == ["tiny-train-00000.tar", "tiny-train-00001.tar"]


def test_totals_count_every_document_and_official_words_come_first(tmp_path: Path) -> None:
    index, num_words = write(make_documents(), tmp_path), sum(length // 2 for length in LENGTHS)
    assert (index.num_tokens, index.num_bytes) == (sum(LENGTHS), 3 * sum(LENGTHS))
    assert index.num_words == index.counted_words == num_words
    index = write(make_documents(), tmp_path, official_words=12_345)
    assert read_index(tmp_path) == index and (index.num_words, index.counted_words) == (12_345, num_words)


@pytest.mark.parametrize("name", ["", "10.5", "a/b", "a\\b", "a\nb", "caf\u00e9", "x" * 81])
def test_ids_that_a_tar_cannot_carry_are_refused(tmp_path: Path, name: str) -> None:
    with refused(ValueError, f"document id {name!r}"):
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
    with refused(ValueError, "document id '00' comes twice"):
        write(make_documents()[:1] * 2, tmp_path)
    with refused(ShardError, "index.json is missing"):
        read_index(tmp_path)


@pytest.mark.parametrize("kind", ["tokens", "mask", "recall"])
def test_a_flipped_bit_in_any_array_is_found_by_its_document(tmp_path: Path, kind: str) -> None:
    index = write(make_documents(), tmp_path)
    flip(tmp_path / "tiny-train-00000.tar", getattr(index.documents[0], f"{kind}_offset") + 5)
    with refused(ShardError, "document 00", "checksum"):
        check_document(read_index(tmp_path), 0)
    check_document(read_index(tmp_path), 3)


# The index


TAR_BYTES = 2**41
SECOND = 4  # the first document of the second tar


def rewrite(path: Path, edit: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> None:
    """Write an index that says something else, with the checksums that it must have."""
    head, columns = json.loads(path.read_text()), load_file(path.with_name(DOCUMENTS_NAME))
    edit(head, columns)
    write_index(path.parent, head, columns)


def many_documents() -> list[TokenizedDocument]:
    """With tokens of both widths."""
    made = [make_documents(dtype) for dtype in (np.uint16, np.uint32)]
    return [replace(each, id=f"{copy}-{each.id}") for copy in range(9) for each in made[copy % 2]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(many_documents(), tmp_path / "train", max_shard_bytes=SHARD_BYTES)
    return tmp_path / "train" / INDEX_NAME


def test_every_entry_and_the_plan_are_those_that_were_written(path: Path) -> None:
    documents, expected = read_index(path.parent).documents, many_documents()
    for entry, document in zip(documents, expected, strict=True):
        for fact in ("id", "title", "year", "words", "bytes"):
            assert getattr(entry, fact) == getattr(document, fact)
        assert entry.dtype == document.tokens.dtype.str
    entries, lengths = list(documents), np.array([len(document.tokens) for document in expected])
    assert [documents[number] for number in (-1, 17)] == [entries[number] for number in (-1, 17)]
    assert documents[59:5:-7] == entries[59:5:-7]
    assert np.array_equal(documents[59:5:-7].num_tokens, lengths[59:5:-7])
    assert documents.in_shard(documents.shard_of(SECOND)) == [SECOND, SECOND + 1]
    ours, theirs = (DocumentPlan(each, num_lanes=8, seg_len=128, seed=3) for each in (documents.num_tokens, lengths))
    assert all(ours.documents(epoch, 5) == theirs.documents(epoch, 5) for epoch in range(2))
    assert not documents.num_tokens.flags.writeable
    assert isinstance(documents.num_tokens.base, np.ndarray), "a view of the map, not a copy"
    with pytest.raises(IndexError):
        documents[len(expected)]


def test_the_library_of_safetensors_reads_the_columns(path: Path) -> None:
    columns, first = load_file(path.with_name(DOCUMENTS_NAME)), read_index(path.parent).documents[0]
    assert columns["num_tokens"][0] == first.num_tokens
    assert columns["id_text"][: columns["id_ends"][0]].tobytes() == first.id.encode()
    assert columns["sha256"][0].tobytes().hex() == first.sha256


def test_columns_that_are_missing_or_of_another_build_are_refused_with_both_files(path: Path, tmp_path: Path) -> None:
    path.with_name(DOCUMENTS_NAME).unlink()
    with refused(ShardError, path, DOCUMENTS_NAME):
        read_index(path.parent)
    write(make_documents(), tmp_path / "other")
    (tmp_path / "other" / DOCUMENTS_NAME).replace(path.with_name(DOCUMENTS_NAME))
    with refused(ShardError, path, DOCUMENTS_NAME):
        read_index(path.parent)


def cut_a_character(columns: dict[str, np.ndarray]) -> None:
    place = int(np.flatnonzero(columns["title_text"] == 0xE2)[0])
    columns["title_ends"][int(np.searchsorted(columns["title_ends"], place, side="right"))] = place + 1


def grow_an_id(columns: dict[str, np.ndarray]) -> None:
    """To more than the 80 bytes that it may have."""
    columns["id_ends"][:20] = columns["id_ends"][20]


# A column and what its second value becomes, or what changes the columns; and what is said.
VALUES: list[tuple[tuple[str, int] | Callable[[dict[str, np.ndarray]], None], str]] = [
    (("num_tokens", -1), "num_tokens of document 4 is -1"),
    (("words", 2**60), "words of document 4 is"),
    (("words", 2**50), "counted_words of index.json"),
    (("tokens_offset", -1), "tokens_offset of document 4 is -1"),
    (("tokens_offset", TAR_BYTES), "tokens of document 0-40 end behind"),
    (("mask_offset", TAR_BYTES), "mask of document 0-40 end behind"),
    (("recall_offset", TAR_BYTES - 27), "recall of document 0-40 end behind"),
    (("shard", 99), "shard of document 4 is 99"),
    (("token_bytes", 3), "token_bytes of document 4 is 3"),
    (("id_ends", 0), "id_ends do not cut id_text"),
    (("title_ends", -(2**63)), "title_ends of document 4 is -"),
    (("id_text", ord("/")), "an id has the byte 0x2f"),
    (("title_text", 0xC3), "a title is no UTF-8"),
    (cut_a_character, "the title of document 0 ends within a character"),
    (grow_an_id, "the id of document 0 has 84 bytes"),
]


@pytest.mark.parametrize(("wrong", "named"), VALUES)
def test_values_that_no_reader_could_use_are_named(
    path: Path, wrong: tuple[str, int] | Callable[[dict[str, np.ndarray]], None], named: str
) -> None:
    def edit(head: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        if callable(wrong):
            wrong(columns)
            return
        column, value = wrong
        head["shards"][1]["bytes"] = TAR_BYTES
        columns[column][SECOND] = value

    rewrite(path, edit)
    with refused(ShardError, path.with_name(DOCUMENTS_NAME), named):
        read_index(path.parent)


@pytest.mark.parametrize("kind", ["without a column", "of another type", "no safetensors", "deep", "another number"])
def test_columns_that_are_not_those_of_an_index_are_refused(path: Path, kind: str) -> None:
    """The checksum fits."""
    file = path.with_name(DOCUMENTS_NAME)
    body, columns = json.loads(path.read_text()), load_file(file)
    if kind == "another number":
        body["num_documents"] += 1
    elif kind == "without a column":
        del columns["shard"]
    else:
        columns["words"] = columns["words"].astype(np.int32)
    save_file(columns, file)
    if kind == "no safetensors":
        file.write_bytes(b"\xff" * 100)
    if kind == "deep":
        file.write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5)
    write_json(path, body | {"documents": described(file)})
    with refused(ShardError, file, "its columns are not those of an index"):
        read_index(path.parent)


def described(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"name": file.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body | {"fingerprint": fingerprint_of(body)}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_tokens": 7}, "num_tokens of index.json is 7"),
        ({"shards": []}, "shard of document 0"),
        ({"documents": []}, "index.json is damaged (documents is []"),
        ({"x": 1}, "an unknown key 'x'"),
        ({"format_version": 1}, "format_version 1, "),
        ({"format_version": 3}, "update dist_mem"),
        ({"format_version": None}, "format_version"),
        ({"documents": {"name": "../x", "bytes": 1, "sha256": "0" * 64}}, "documents.name is '../x'"),
    ],
    ids=str,
)
def test_a_wrong_index_json_is_refused(path: Path, changes: dict[str, Any], named: str) -> None:
    write_json(path, json.loads(path.read_text()) | changes)
    with refused(ShardError, path.parent, named):
        read_index(path.parent)


def test_an_index_json_with_all_documents_in_it_is_not_even_read(path: Path) -> None:
    """Such files of earlier versions have gigabytes."""
    with path.open("ab") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with refused(ShardError, "index.json has", "older format"):
        read_index(path.parent)


def test_a_tar_ends_after_so_many_documents_or_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and padding of short documents take more than their arrays."""
    monkeypatch.setattr(shard, "MAX_SHARD_DOCUMENTS", 4)
    index = make_split(tmp_path / "train", [3] * 10)
    assert [len(index.documents.in_shard(each)) for each in index.shards] == [4, 4, 2]
    index = make_split(tmp_path / "train", [3] * 10, max_shard_bytes=12)
    assert [len(index.documents.in_shard(each)) for each in index.shards] == [2] * 5

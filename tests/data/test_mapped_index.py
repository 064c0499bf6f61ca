"""A mapped index: equal to the simple reader, never that of another index.json, and made once."""

from __future__ import annotations

import json
import logging
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dist_mem.data.document_table import DocumentEntry, DocumentTable
from dist_mem.data.index_file import MappedIndex, in_memory
from dist_mem.data.index_json import fingerprint_of, read_index_json
from dist_mem.data.index_reading import FILE_NAME, open_mapped
from dist_mem.data.index_schema import _DOCUMENT, _are_plainly_valid
from dist_mem.data.json_stream import object_parts
from dist_mem.data.metadata import ShardError
from dist_mem.data.plan import DocumentPlan
from dist_mem.data.shard import read_index
from tests.checkpoint.test_valid_hash_edits import edited

NUM_DOCUMENTS = 4_500  # two parts of a list, over one MiB of JSON


def documents_of(draw: random.Random, number: int) -> list[dict[str, Any]]:
    """Entries of every kind: empty documents, titles in any script, missing years, masks and recall distances."""
    lengths = [draw.choice([0, 1, 2, draw.randrange(3, 5000)]) for _ in range(number)]
    return [
        {
            "id": f"{place}-{draw.randrange(10**6)}",
            "title": draw.choice(["", "Le livre d\u2019or", "\u4e66 \U0001f4d6", 'say "no"\n\\', f"Book {place}"]),
            "year": draw.choice([None, -500, 1850]),
            "words": length // 2,
            "bytes": 3 * length,
            "num_tokens": length,
            "shard": f"tiny-train-{place % 3:05d}.tar",
            "dtype": draw.choice(["<u2", "<u4"]),
            "tokens_offset": draw.randrange(2**40),
            "mask_offset": draw.choice([None, draw.randrange(2**40)]),
            "recall_offset": draw.choice([None, draw.randrange(2**40)]),
            "sha256": draw.randbytes(32).hex(),
        }
        for place, length in enumerate(lengths)
    ]


def write_json(folder: Path, documents: list[dict[str, Any]], changes: dict[str, Any] | None = None) -> Path:
    body: dict[str, Any] = {
        "format_version": 1,
        "name": "tiny",
        "split": "train",
        "tokenizer_fingerprint": "f",
        "recipe": "",
        "official_words": None,
        "num_tokens": sum(entry["num_tokens"] for entry in documents),
        "counted_words": sum(entry["words"] for entry in documents),
        "num_bytes": sum(entry["bytes"] for entry in documents),
        "shards": [{"name": f"tiny-train-{i:05d}.tar", "bytes": 2**50, "sha256": "0" * 64} for i in range(3)],
        "documents": documents,
    } | (changes or {})
    body["fingerprint"] = fingerprint_of(body)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_text(json.dumps(body, indent=1) + "\n")
    return folder / "index.json"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dist_mem" / "indexes"


def entries(found: MappedIndex) -> DocumentTable:
    return DocumentTable(found.columns, found.shards)


def simple(path: Path) -> list[DocumentEntry]:
    return [DocumentEntry(**entry) for entry in json.loads(path.read_text())["documents"]]


def test_every_entry_and_the_plan_equal_those_of_the_simple_reader(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), NUM_DOCUMENTS))
    expected = simple(path)
    for _ in range(2):  # written, and found
        index = read_index(path.parent)
        assert (path.parent / FILE_NAME).is_file()
        assert index.documents == expected
        assert [index.documents[number] for number in (-1, 17, -NUM_DOCUMENTS)] == [
            expected[number] for number in (-1, 17, -NUM_DOCUMENTS)
        ]
        assert index.documents[4490:5:-7] == expected[4490:5:-7]
        lengths = np.array([entry.num_tokens for entry in expected])
        assert np.array_equal(index.documents[4490:5:-7].num_tokens, lengths[4490:5:-7])
        assert index.num_tokens == lengths.sum()
        plans = [
            DocumentPlan(each, num_lanes=64, seg_len=128, seed=3) for each in (index.documents.num_tokens, lengths)
        ]
        for epoch in range(2):
            ours, theirs = (plan.documents(epoch, 5) for plan in plans)
            assert ours == theirs
    assert not index.documents.num_tokens.flags.writeable
    assert isinstance(index.documents.num_tokens.base, np.ndarray), "a view of the map, not a copy"
    assert not cache.exists()
    with pytest.raises(IndexError):
        index.documents[NUM_DOCUMENTS]


def test_the_library_of_safetensors_reads_the_file(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(1), 50))
    found = open_mapped(path)
    theirs = load_file(path.parent / FILE_NAME)
    assert theirs.keys() == found.columns.keys()
    assert all(np.array_equal(theirs[name], found.columns[name]) for name in theirs)
    assert all(np.array_equal(in_memory(read_index_json(path)).columns[name], theirs[name]) for name in theirs)


def test_a_split_without_documents_can_be_mapped(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", [])
    assert entries(open_mapped(path)) == entries(open_mapped(path)) == []


def test_a_changed_index_is_never_read_through_an_old_file(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), 40))
    open_mapped(path)
    first = path.stat()
    documents = documents_of(random.Random(0), 40)
    documents[7]["sha256"] = "1" * 64  # a file of the same size
    write_json(tmp_path / "train", documents)
    assert path.stat().st_size == first.st_size
    assert entries(open_mapped(path)) == simple(path)
    path.write_text(path.read_text().replace('"words": ', '"words":  ', 1).replace("1111", "1112", 1))
    with pytest.raises(ShardError, match="does not match its fingerprint"):
        open_mapped(path)


@pytest.mark.parametrize("damage", ["cut", "flip", "append", "empty", "foreign", "layout"])
def test_a_damaged_or_foreign_file_is_made_again(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), 40))
    open_mapped(path)
    file = path.parent / FILE_NAME
    whole = file.read_bytes()
    draw = random.Random(damage)
    for _ in range(10):
        place = draw.randrange(len(whole))
        file.write_bytes(
            {
                "cut": whole[:place],
                "flip": whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :],
                "append": whole + b"\0",
                "empty": b"",
                "foreign": draw.randbytes(place),
                "layout": whole.replace(b'"layout": "1"', b'"layout": "0"'),
            }[damage]
        )
        with caplog.at_level(logging.WARNING):
            assert entries(open_mapped(path)) == simple(path)
        assert f"{file} cannot be used" in caplog.text or damage == "flip"  # a flip may name another index
        assert "it is made again from index.json" in caplog.text or damage == "flip"
        assert file.read_bytes() == whole
        caplog.clear()


def test_without_write_permission_the_file_is_in_the_cache(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), 40))
    (path.parent / f".{FILE_NAME}.lock").mkdir()  # as root, no mode of the folder would stop us
    for _ in range(2):
        assert entries(open_mapped(path)) == simple(path)
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"]
    assert sorted(file.name for file in path.parent.iterdir()) == [f".{FILE_NAME}.lock", "index.json"]


def test_without_any_place_the_index_is_read_and_the_user_told(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), 40))
    (path.parent / f".{FILE_NAME}.lock").mkdir()
    (tmp_path / "cache").write_text("a file")
    assert entries(open_mapped(path)) == simple(path)
    assert "cannot be kept in a file" in caplog.text and "make one of the folders writable" in caplog.text


def opened(path: Path) -> str:
    found = open_mapped(path)
    return str(found.head["fingerprint"]) + repr(entries(found)[3])


def test_processes_that_open_it_at_once_find_the_same(tmp_path: Path, cache: Path) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), NUM_DOCUMENTS))
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        found = list(pool.map(opened, [path] * 4))
    assert len(set(found)) == 1 and repr(simple(path)[3]) in found[0]
    assert sorted(file.name for file in path.parent.iterdir()) == ["index.json", FILE_NAME]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_quick_check_accepts_nothing_that_the_schema_refuses(seed: int) -> None:
    draw = random.Random(seed)
    documents = edited(documents_of(draw, 6), draw)
    sizes = dict.fromkeys((f"tiny-train-{i:05d}.tar" for i in range(3)), 2**50)
    problems = [problem for entry in documents for problem in _DOCUMENT("", entry)]
    if _are_plainly_valid(documents, sizes):
        assert problems == []
        assert all(entry["shard"] in sizes for entry in documents)


def test_the_quick_check_accepts_what_builders_write() -> None:
    documents = documents_of(random.Random(0), 500)
    sizes = dict.fromkeys((f"tiny-train-{i:05d}.tar" for i in range(3)), 2**50)
    assert _are_plainly_valid(documents, sizes)
    for kind, width in (("tokens", 2), ("mask", 1), ("recall", 4)):
        documents[7].update({"dtype": "<u2", f"{kind}_offset": 2**50 - documents[7]["num_tokens"] * width})
        assert _are_plainly_valid(documents, sizes)
        documents[7][f"{kind}_offset"] += 1
        assert not _are_plainly_valid(documents, sizes)
        documents[7][f"{kind}_offset"] = 0


@settings(max_examples=60, deadline=None)
@given(
    body=st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
            max_leaves=12,
        ),
        max_size=5,
    ),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_a_stream_of_any_blocks_gives_what_json_gives(body: Any, indent: int | None, is_ascii: bool, size: int) -> None:
    text = json.dumps(body, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    found: dict[str, Any] = {}
    for key, value, is_list in object_parts(text[place : place + size] for place in range(0, len(text), size)):
        found[key] = [*found.get(key, []), *value] if is_list else value
    assert found == body
    with pytest.raises(ValueError, match=r"at character \d+|codec can't decode"):
        list(object_parts([text[: len(text) * size // 10]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 7}, "num_tokens is 7, but its documents have"),
        ({"shards": []}, "is not among its shards"),
        ({"documents": {}}, "documents is {}, but must be a list"),
        ({"x": 1}, "it has an unknown key 'x'"),
        ({"format_version": 2}, "format_version 2, newer than 1"),
    ],
)
def test_a_wrong_index_is_refused_and_leaves_no_file(
    tmp_path: Path, cache: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_json(tmp_path / "train", documents_of(random.Random(0), 40), changes)
    with pytest.raises(ShardError, match=message):
        open_mapped(path)
    assert [file.name for file in path.parent.iterdir()] == ["index.json"]


def test_an_id_that_comes_twice_is_refused(tmp_path: Path, cache: Path) -> None:
    documents = documents_of(random.Random(0), 4100)
    documents[4099]["id"] = documents[2]["id"]  # in another part of the list
    with pytest.raises(ShardError, match="documents has an id twice"):
        open_mapped(write_json(tmp_path / "train", documents))


def test_an_invalid_document_is_named(tmp_path: Path, cache: Path) -> None:
    documents = documents_of(random.Random(0), 4100)
    documents[4099]["year"] = "1850"
    with pytest.raises(ShardError, match=r"documents\[4099\]\.year is '1850', but must be an integer"):
        open_mapped(write_json(tmp_path / "train", documents))

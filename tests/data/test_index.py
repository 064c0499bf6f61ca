"""The index: its columns give back every entry, and what is not as it was written is refused by the names of files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dist_mem.data.index import (
    DOCUMENTS_NAME,
    FORMAT_VERSION,
    INDEX_NAME,
    MAX_INDEX_BYTES,
    ColumnParts,
    DocumentEntry,
    fingerprint_of,
    write_index,
)
from dist_mem.data.metadata import ShardError
from dist_mem.data.plan import DocumentPlan
from dist_mem.data.shard import read_index
from tests.support.messages import refused

NUM_DOCUMENTS = 600
TARS = [f"tiny-train-{number:05d}.tar" for number in range(3)]
TAR_BYTES = 2**41
SECOND = NUM_DOCUMENTS // 3  # the first document of the second tar


def entries_of(draw: random.Random, number: int) -> list[DocumentEntry]:
    """Entries of every kind: empty documents, titles in any script, missing years, masks and recall distances."""
    lengths = [draw.choice([0, 1, 2, draw.randrange(3, 5000)]) for _ in range(number)]
    return [
        DocumentEntry(
            id=f"{place}-{draw.randrange(10**6)}",
            title=draw.choice(["", "Le livre d\u2019or", "\u4e66 \U0001f4d6", 'say "no"\n\\', f"Book {place}"]),
            year=draw.choice([None, -500, 1850]),
            words=length // 2,
            bytes=3 * length,
            num_tokens=length,
            shard=TARS[3 * place // number],
            dtype=draw.choice(["<u2", "<u4"]),
            tokens_offset=draw.randrange(2**40),
            mask_offset=draw.choice([None, draw.randrange(2**40)]),
            recall_offset=draw.choice([None, draw.randrange(2**40)]),
            sha256=draw.randbytes(32).hex(),
        )
        for place, length in enumerate(lengths)
    ]


def write(folder: Path, entries: list[DocumentEntry]) -> Path:
    """Write an index, without tars; return the path of its index.json."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = ColumnParts()
    for number, tar in enumerate(TARS):
        if of_tar := [entry for entry in entries if entry.shard == tar]:
            parts.add(of_tar, number)
    head = {
        "format_version": FORMAT_VERSION,
        "name": "tiny",
        "split": "train",
        "tokenizer_fingerprint": "f",
        "recipe": "",
        "official_words": None,
        "num_documents": len(entries),
        "num_tokens": sum(entry.num_tokens for entry in entries),
        "counted_words": sum(entry.words for entry in entries),
        "num_bytes": sum(entry.bytes for entry in entries),
        "shards": [{"name": tar, "bytes": TAR_BYTES, "sha256": "0" * 64} for tar in TARS],
    }
    write_index(folder, head, parts.whole())
    return folder / INDEX_NAME


def rewrite(path: Path, edit: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> None:
    """Write an index that says something else, with the checksums that it must have."""
    head, columns = json.loads(path.read_text()), load_file(path.with_name(DOCUMENTS_NAME))
    edit(head, columns)
    write_index(path.parent, head, columns)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "train", entries_of(random.Random(0), NUM_DOCUMENTS))


def test_every_entry_and_the_plan_are_those_that_were_written(tmp_path: Path) -> None:
    expected = entries_of(random.Random(0), NUM_DOCUMENTS)
    path = write(tmp_path / "train", expected)
    documents = read_index(path.parent).documents
    assert documents == expected
    assert [documents[number] for number in (-1, 17)] == [expected[number] for number in (-1, 17)]
    assert documents[590:5:-7] == expected[590:5:-7]
    lengths = np.array([entry.num_tokens for entry in expected])
    assert np.array_equal(documents[590:5:-7].num_tokens, lengths[590:5:-7])
    assert documents.in_shard(documents.shard_of(SECOND)) == list(range(SECOND, 2 * SECOND))
    ours, theirs = (DocumentPlan(each, num_lanes=8, seg_len=128, seed=3) for each in (documents.num_tokens, lengths))
    assert all(ours.documents(epoch, 5) == theirs.documents(epoch, 5) for epoch in range(2))
    assert not documents.num_tokens.flags.writeable
    assert isinstance(documents.num_tokens.base, np.ndarray), "a view of the map, not a copy"
    with pytest.raises(IndexError):
        documents[NUM_DOCUMENTS]


def test_the_library_of_safetensors_reads_the_columns(path: Path) -> None:
    columns, first = load_file(path.with_name(DOCUMENTS_NAME)), read_index(path.parent).documents[0]
    assert columns["num_tokens"][0] == first.num_tokens
    assert columns["id_text"][: columns["id_ends"][0]].tobytes() == first.id.encode()
    assert columns["sha256"][0].tobytes().hex() == first.sha256


def test_columns_that_are_missing_or_of_another_build_are_refused_with_both_files(path: Path, tmp_path: Path) -> None:
    path.with_name(DOCUMENTS_NAME).unlink()
    with refused(ShardError, path, DOCUMENTS_NAME):
        read_index(path.parent)
    other = write(tmp_path / "other" / "train", entries_of(random.Random(1), NUM_DOCUMENTS))
    other.with_name(DOCUMENTS_NAME).replace(path.with_name(DOCUMENTS_NAME))
    with refused(ShardError, path, DOCUMENTS_NAME):
        read_index(path.parent)


def cut_a_character(columns: dict[str, np.ndarray]) -> None:
    place = int(np.flatnonzero(columns["title_text"] == 0xE2)[0])
    columns["title_ends"][int(np.searchsorted(columns["title_ends"], place, side="right"))] = place + 1


def grow_an_id(columns: dict[str, np.ndarray]) -> None:
    """To more than the 80 bytes that it may have."""
    columns["id_ends"][:20] = columns["id_ends"][20]


VALUES: list[tuple[str, int] | Callable[[dict[str, np.ndarray]], None]] = [
    *(("num_tokens", -1), ("words", 2**60), ("words", 2**50), ("tokens_offset", -1), ("tokens_offset", TAR_BYTES)),
    *(("mask_offset", TAR_BYTES), ("recall_offset", TAR_BYTES - 3), ("shard", 3), ("token_bytes", 3), ("id_ends", 0)),
    *(("title_ends", -(2**63)), ("id_text", ord("/")), ("title_text", 0xC3), cut_a_character, grow_an_id),
]


@pytest.mark.parametrize("wrong", VALUES)
def test_values_that_no_reader_could_use_are_named(
    path: Path, wrong: tuple[str, int] | Callable[[dict[str, np.ndarray]], None]
) -> None:
    def edit(head: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        if callable(wrong):
            wrong(columns)
            return
        column, value = wrong
        if column.endswith("_offset"):
            columns["num_tokens"][SECOND] += 1  # of no token, the end is not behind the tar
            head["num_tokens"] += 1
        columns[column][SECOND] = value

    rewrite(path, edit)
    with refused(ShardError, path.with_name(DOCUMENTS_NAME)):
        read_index(path.parent)


@pytest.mark.parametrize("kind", ["without a column", "of another type", "no safetensors", "another number"])
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
    write_json(path, body | {"documents": described(file)})
    with refused(ShardError, file):
        read_index(path.parent)


def described(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"name": file.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body | {"fingerprint": fingerprint_of(body)}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_tokens": 7}, {"shards": []}, {"documents": []}, {"x": 1}, {"format_version": 1}, {"format_version": 3}),
        {"format_version": None},
        {"documents": {"name": "../x", "bytes": 1, "sha256": "0" * 64}},
    ],
    ids=str,
)
def test_a_wrong_index_json_is_refused(path: Path, changes: dict[str, Any]) -> None:
    write_json(path, json.loads(path.read_text()) | changes)
    with refused(ShardError, path.parent):
        read_index(path.parent)


def test_an_index_json_with_all_documents_in_it_is_not_even_read(path: Path) -> None:
    """Such files of earlier versions have gigabytes."""
    with path.open("ab") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with refused(ShardError, "index.json"):
        read_index(path.parent)

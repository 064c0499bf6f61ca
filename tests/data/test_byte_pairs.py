"""GPT-2's byte pairs: lossless, the ids of the tokenizers library and of transformers, one file whatever the source."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.data.documents import Documents
from dist_mem.data.shard import read_index
from dist_mem.data.tokenizers.byte_pairs import (
    END_OF_TEXT,
    BytePairTokenizer,
    read_byte_pairs,
    train_byte_pairs,
    write_byte_pairs,
)
from dist_mem.data.tokenizers.registry import load_tokenizer, save_tokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from tests.support.limits import limit
from tests.support.messages import refused

AWKWARD = [
    *("", "\n\n\n", "  a  ", " \t\r\n", "\0", "it's I'LL 2024", f"a{END_OF_TEXT}b"),
    *("\u00e9\u4e2d\U0001f600", "e\u0301", "\ufeff\u2028"),
]


def sentences() -> list[str]:
    draw = random.Random(0)
    words = ["the", "of", "and", "a", "house", "river", "it's", "we'll", "went", "1999", "\u00c9mile", "\u4e2d"]
    return [" ".join(draw.choices(words, k=12)) + draw.choice([".\n", "!\n\n", " "]) for _ in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return train_byte_pairs(sentences(), vocab_size=300)


def test_without_the_library_an_error_names_the_extra_and_blames_no_file(
    tokenizer: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    write_byte_pairs(tokenizer, tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for read in (load_tokenizer, read_byte_pairs):
        with refused(UnusableError, "dist-mem[hf]") as caught:
            read(tmp_path)
        assert str(tmp_path) not in str(caught.value)


@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(AWKWARD + sentences())))
@settings(deadline=None)
def test_decoding_gives_the_text_back(tokenizer: BytePairTokenizer, text: str) -> None:
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos_id, *ids]) == text
    assert ids.dtype == np.uint16
    assert tokenizer.bos_id not in ids
    assert all(0 <= offset < len(text) for offset in offsets)


def test_ids_are_those_of_the_library(tmp_path: Path, tokenizer: BytePairTokenizer) -> None:
    """Read back from vocab.json and merges.txt by its own byte-level BPE; merges are used, and newlines seen whole."""
    write_byte_pairs(tokenizer, tmp_path)
    theirs = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in [*AWKWARD, *sentences(), "".join(sentences())]:
        assert tokenizer.encode(text).tolist() == theirs.encode(text).ids
    assert len(tokenizer.encode(" the house")) == 2


def test_ids_are_those_of_transformers(tmp_path: Path, tokenizer: BytePairTokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_byte_pairs(tokenizer, tmp_path)
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in [text for text in AWKWARD if END_OF_TEXT not in text] + sentences():
        assert tokenizer.encode(text).tolist() == theirs(text)["input_ids"]
    assert theirs.bos_token_id == tokenizer.bos_id == tokenizer.vocab_size - 1


def test_both_layouts_and_the_data_directory_hold_the_same_tokenizer(
    tmp_path: Path, tokenizer: BytePairTokenizer
) -> None:
    two, one, kept = tmp_path / "two", tmp_path / "one", tmp_path / "kept"
    for folder in (two, one):
        folder.mkdir()
    write_byte_pairs(tokenizer, two)
    library = tokenizers.ByteLevelBPETokenizer(str(two / "vocab.json"), str(two / "merges.txt"))
    library.add_special_tokens([END_OF_TEXT])
    library.save(str(one / "tokenizer.json"))
    save_tokenizer(tokenizer, kept, recipe="test")
    found = [read_byte_pairs(two), read_byte_pairs(one), load_tokenizer(kept)]
    assert {other.fingerprint for other in found} == {tokenizer.fingerprint}
    assert (kept / "tokenizer.bpe.json").read_bytes() == tokenizer.content()
    other = train_byte_pairs(sentences()[:50], vocab_size=300)
    assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
        {"model": {"type": "BPE"}},
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, tokenizer: BytePairTokenizer, change: dict[str, object]) -> None:
    write_byte_pairs(tokenizer, tmp_path)
    library = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    parts = json.loads(library.to_str())
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps({**parts, **change}), encoding="utf-8")
    with refused(ValueError, tmp_path):
        read_byte_pairs(tmp_path)


def test_a_folder_without_a_tokenizer_and_a_token_outside_of_the_alphabet_are_named(
    tmp_path: Path, tokenizer: BytePairTokenizer
) -> None:
    """As in GPT-NeoX's tokenizer, which adds tokens of several spaces."""
    with refused(ValueError, "vocab.json", "merges.txt", "tokenizer.json"):
        read_byte_pairs(tmp_path)
    write_byte_pairs(tokenizer, tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "  ": len(vocabulary)}), encoding="utf-8")
    with refused(ValueError):
        read_byte_pairs(tmp_path)


def test_a_vocabulary_of_the_wrong_size_is_refused() -> None:
    with refused(ValueError):
        train_byte_pairs(["a"], vocab_size=256)
    with refused(ValueError):
        train_byte_pairs(["ab ab"], vocab_size=5000)


def test_the_command_trains_and_a_dataset_is_built_with_it(tmp_path: Path) -> None:
    """By two worker processes; what is in the shards decodes to the texts."""
    texts = tmp_path / "texts"
    texts.mkdir()
    documents = []
    for number in range(4):
        path = texts / f"{number}.txt"
        path.write_text("".join(sentences()[number::4]), encoding="utf-8")
        documents.append(SourceDocument(id=str(number), title="t", source=path))
    program = [sys.executable, "-m", "dist_mem.datasets.gpt2_tokenizer"]
    command = [*program, str(texts), "--train", "--vocab-size", "300"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "tok")], capture_output=True, text=True, timeout=limit(120)
    )
    assert done.returncode == 0, done.stderr
    assert "300 tokens" in done.stdout
    build_dataset({"test": documents}, tmp_path / "data", name="x", tokenizer_from=tmp_path / "tok", workers=2)
    built = load_tokenizer(tmp_path / "data")
    index = read_index(tmp_path / "data" / "test")
    reader = Documents(index, np.array([entry.num_tokens for entry in index.documents]), bos_id=built.bos_id)
    for number, document in enumerate(documents):
        assert built.decode(reader.open(number).tokens) == document.source.read_text(encoding="utf-8")

"""One token a word: round trips, line ends, unknown words, and the order of a counted vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import read_index, read_tokens
from dist_mem.data.tokenizers.registry import load_tokenizer, save_tokenizer
from dist_mem.data.tokenizers.words import WordTokenizer, count_words
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from tests.support.messages import refused

TEXT = " = One = \n \n the cat and the dog <unk> \n"


def test_lines_end_in_eos_and_decoding_gives_the_words_back() -> None:
    tokenizer = count_words(TEXT.splitlines())
    assert tokenizer.words[:3] == ["<eos>", "=", "the"]  # the most frequent first, equal ones as they first appear
    tokens = tokenizer.encode(TEXT)
    assert [tokenizer.words[token] for token in tokens] == TEXT.replace("\n", " <eos> ").split()
    assert tokenizer.decode(tokens).split() == TEXT.split()
    assert tokenizer.decode(tokens).count("\n") == TEXT.count("\n")
    assert tokenizer.vocab_size == tokenizer.bos_id + 1


@pytest.mark.parametrize("text", [TEXT, "", "a\u00c9 \n\n b", "\n a"])
def test_offsets_are_where_the_words_begin(text: str) -> None:
    tokenizer = count_words([*text.splitlines(), "<unk>"])
    tokens, starts = tokenizer.encode_with_offsets(text)
    assert np.array_equal(tokens, tokenizer.encode(text))
    for token, start in zip(tokens, starts, strict=True):
        word = tokenizer.words[token]
        assert text[start:].startswith("\n" if word == "<eos>" else word)


def test_other_words_are_unknown() -> None:
    tokenizer = WordTokenizer(["a", "<unk>"])
    assert tokenizer.encode("a b\na").tolist() == [0, 1, 0]
    with refused(ValueError):
        WordTokenizer(["a"]).encode("a b")


def test_a_vocabulary_has_room_for_a_word_beside_line_ends_and_the_unknown() -> None:
    lines = ["a a a b b c d e"]
    assert count_words(lines, max_words=3).words == ["<unk>", "a", "<eos>"]
    assert count_words(lines, max_words=4).words == ["a", "<unk>", "b", "<eos>"], "rare words share one token"
    for max_words in (2, -1):
        with refused(ValueError, f"max_words is {max_words}"):
            count_words(lines, max_words=max_words)


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""]])
def test_what_is_no_vocabulary_is_refused(words: list[str]) -> None:
    with refused(ValueError):
        WordTokenizer(words)


def test_a_data_directory_keeps_it(tmp_path: Path) -> None:
    tokenizer = count_words(TEXT.splitlines())
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer.words").write_text("other\n")
    with refused(ValueError):
        load_tokenizer(tmp_path)


def test_a_dataset_can_be_built_with_a_ready_one(tmp_path: Path) -> None:
    tokenizer = count_words(TEXT.splitlines())
    build_dataset({"train": [SourceDocument("a", "", TEXT)]}, tmp_path, name="tiny", tokenizer=tokenizer)
    assert np.array_equal(read_tokens(read_index(tmp_path / "train"), 0), tokenizer.encode(TEXT))

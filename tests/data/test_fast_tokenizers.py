"""A fast tokenizer has the ids of ours, on every text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs
from dist_mem.data.tokenizers.fast import bos_token, fast_tokenizer
from dist_mem.data.tokenizers.registry import KINDS
from dist_mem.data.tokenizers.sentencepiece import train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import WordTokenizer, count_words
from tests.support.messages import refused
from tests.support.paths import ROOT

LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
MAKE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": BytesTokenizer,
    "words": lambda: count_words(LINES, max_words=200),
    "gpt2": lambda: train_byte_pairs(LINES, vocab_size=600),
    "sentencepiece": lambda: train_pieces(LINES, vocab_size=600),
}


def texts() -> Iterator[str]:
    """Pages, random texts of few letters, and every character of the Basic Multilingual Plane that UTF-8 has."""
    yield from ["", "\n".join(LINES), "<s> </s> <unk> <0x41> <eos> <|endoftext|> \u2581\u2581 \U0001f600 \x00"]
    yield " ".join(f"a{chr(code)}b" for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    draw = random.Random(0)
    for letters in ("ab ", "aab\n ", "the memory \n", "aaaa", " \t\n\r\x0b\x1c\x85\u2028ab", "\u00e9\u2581 <s>x"):
        yield from ("".join(draw.choices(letters, k=draw.randint(0, 60))) for _ in range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_tokenizer(kind: str) -> None:
    tokenizer = MAKE[kind]()
    fast = fast_tokenizer(tokenizer, adds_bos=True)
    fast.encode_special_tokens = True  # as with `split_special_tokens` in tokenizer_config.json
    assert fast_tokenizer(tokenizer, adds_bos=False).encode("a").ids == tokenizer.encode("a").tolist()
    for text in texts():
        ids = tokenizer.encode(text).tolist()
        assert fast.encode(text).ids == [tokenizer.bos_id, *ids], text
        assert fast.decode(ids) == tokenizer.decode(ids)


def test_words_that_a_vocabulary_lacks_are_an_error_there_too_and_bos_is_no_word() -> None:
    tokenizer = WordTokenizer(["<s>", "a"])
    fast = fast_tokenizer(tokenizer, adds_bos=True)
    assert bos_token(tokenizer) == "<<s>>"
    assert fast.encode("a <s>").ids == [2, 1, 0]
    with refused(Exception):
        fast.encode("b")


def test_a_unigram_model_is_refused() -> None:
    with refused(ValueError):
        fast_tokenizer(train_pieces(LINES, vocab_size=500, model_type="unigram"), adds_bos=True)

"""Tokenizers are lossless, deterministic, and say where each token begins."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import load_tokenizer, save_tokenizer, train_sentencepiece
from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer, sample_lines
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from tests.support.messages import refused

VOCAB_SIZE = 400
AWKWARD = [
    *("\n", "\n\n\n", "  ", "a   b", "   x\n\n  y  ", "\t\t", "\r", "\r\n", "\0", "a\0b", "\u2581"),
    *(" \u2581 ", "\u2585", "<s>", "</s>", "<unk>", "<0x41>", "\u00e9\u4e2d\U0001f600", "e\u0301", "\ufeff"),
    *("\u2028\x85\x0b\x0c", "2024"),
]
WORDS = [
    *("the", "of", "and", "a", "house", "river", "mountain", "walked"),
    *("said", "never", "17", "where's", "promised", "letter", "old"),
]


def sentences(num: int = 200) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(num)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(sentences(), directory, vocab_size=VOCAB_SIZE)
    return directory


@pytest.fixture(scope="module", params=["sentencepiece", "bytes"])
def tokenizer(request: pytest.FixtureRequest, trained: Path) -> Tokenizer:
    return BytesTokenizer() if request.param == "bytes" else load_tokenizer(trained)


def texts() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*AWKWARD, *sentences(3)]) | st.text(max_size=8), max_size=8).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=texts())
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_awkward_text_is_lossless_alone(tokenizer: Tokenizer) -> None:
    for text in ["", *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=texts())
def test_offsets_are_the_characters_that_hold_the_first_byte_of_each_token(tokenizer: Tokenizer, text: str) -> None:
    ids, starts = tokenizer.encode_with_offsets(text)
    assert np.array_equal(ids, tokenizer.encode(text))
    assert len(starts) == len(ids)
    position = 0  # in bytes
    for token, start in zip(ids.tolist(), starts.tolist(), strict=True):
        assert len(text[:start].encode()) <= position < len(text[: start + 1].encode())
        position += len(tokenizer.pieces[token])
    assert position == len(text.encode())


def test_lines_are_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    lines = [f"{line}\n" for line in sentences(20)]
    whole = tokenizer.encode("".join(lines))
    assert np.array_equal(whole, np.concatenate([tokenizer.encode(line) for line in lines]))
    assert all(piece == b"\n" for piece in tokenizer.pieces if b"\n" in piece)


def test_ids_take_two_bytes_and_hold_no_bos_which_is_decoded_as_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the river")
    assert ids.dtype == tokenizer.dtype == np.uint16
    assert tokenizer.bos_id not in ids and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.bos_id, *ids]) == "the river"


def test_a_trained_vocabulary_is_shorter_than_bytes(trained: Path) -> None:
    text = "\n".join(sentences(20))
    assert len(load_tokenizer(trained).encode(text)) < len(text) / 3


def test_training_again_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    train_sentencepiece(iter(sentences()), tmp_path, vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer.model"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_sampled_training_depends_on_its_seed_alone(tmp_path: Path) -> None:
    fingerprints = [
        train_sentencepiece(
            sentences(), tmp_path / str(run), vocab_size=VOCAB_SIZE, max_sentences=20, seed=seed
        ).fingerprint
        for run, seed in enumerate((1, 1, 2))
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_long_lines_are_trained_on_too(tmp_path: Path) -> None:
    line = " ".join(sentences(2000))  # 100 kB; SentencePiece by itself skips lines above its limit
    assert "river" in train_sentencepiece([line], tmp_path, vocab_size=VOCAB_SIZE).decode(range(VOCAB_SIZE))


def test_a_model_that_would_lose_text_is_refused() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    with refused(ValueError):
        SentencePieceTokenizer(model.getvalue())


@pytest.mark.parametrize(("vocab_size", "beyond"), [(9000, 1), (100, -1)])
def test_a_vocabulary_of_the_wrong_size_is_refused_with_the_size_that_is_possible(
    tmp_path: Path, vocab_size: int, beyond: int
) -> None:
    with refused(ValueError, "vocab_size") as refusal:
        train_sentencepiece(sentences(), tmp_path, vocab_size=vocab_size)
    possible = int(str(refusal.value).split()[-1])
    assert train_sentencepiece(sentences(), tmp_path, vocab_size=possible).vocab_size == possible
    with pytest.raises(ValueError, match=f"possible value is {possible}"):
        train_sentencepiece(sentences(), tmp_path, vocab_size=possible + beyond)


def test_no_text_is_refused(tmp_path: Path) -> None:
    with refused(ValueError):
        train_sentencepiece([], tmp_path)


@given(num_lines=st.integers(0, 30), max_lines=st.integers(1, 10), seed=st.integers(0, 5))
def test_a_sample_is_a_subset_of_the_right_size(num_lines: int, max_lines: int, seed: int) -> None:
    lines = [str(number) for number in range(num_lines)]
    sample = sample_lines(lines, max_lines, seed=seed)
    assert len(set(sample)) == len(sample) == min(num_lines, max_lines)
    assert set(sample) <= set(lines)
    assert sample == sample_lines(iter(lines), max_lines, seed=seed)


def test_every_line_is_equally_likely_to_be_sampled() -> None:
    counts = Counter(line for seed in range(3000) for line in sample_lines("abcdefghij", 3, seed=seed))
    expected = 3000 * 3 / 10
    assert all(abs(counts[line] - expected) < 5 * expected**0.5 for line in "abcdefghij")


def test_a_saved_tokenizer_loads_as_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    facts = ("kind", "vocab_size", "bos_id", "fingerprint", "pieces")
    assert all(getattr(loaded, fact) == getattr(tokenizer, fact) for fact in facts)


def edit_json(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: (path / "tokenizer.json").unlink(),
    "not json": lambda path: (path / "tokenizer.json").write_text("{"),
    "newer": lambda path: edit_json(path, format_version=2),
    "unknown kind": lambda path: edit_json(path, kind="letters"),
    "other tokenizer": lambda path: edit_json(path, fingerprint="0"),
    "no model": lambda path: (path / "tokenizer.model").unlink(),
    "cut model": lambda path: (path / "tokenizer.model").write_bytes(b"\x0a\x99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tokenizer_is_refused_by_name(trained: Path, tmp_path: Path, damage: str) -> None:
    save_tokenizer(load_tokenizer(trained), tmp_path)
    DAMAGE[damage](tmp_path)
    with refused(ValueError, f"{tmp_path}/tokenizer."):
        load_tokenizer(tmp_path)

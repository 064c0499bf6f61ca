"""Tokenizers are lossless and deterministic, say where each token begins, and have the ids of the libraries."""

import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, BytePairTokenizer, train_byte_pairs, write_byte_pairs
from dist_mem.data.tokenizers.fast import bos_token, fast_tokenizer
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer
from dist_mem.data.tokenizers.registry import KINDS, find_tokenizer, load_tokenizer, save_tokenizer, train_sentencepiece
from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer, sample_lines, train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import WordTokenizer, count_words
from dist_mem.datasets import gpt2_tokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from tests.support.data_builders import documents_of
from tests.support.limits import limit
from tests.support.messages import refused, said
from tests.support.paths import ROOT

VOCAB_SIZE = 400
AWKWARD = [
    *("\n", "\n\n\n", "  ", "a   b", "   x\n\n  y  ", "\t\t", "\r", "\r\n", "\0", "a\0b", "\u2581"),
    *(" \u2581 ", "\u2585", "<s>", "</s>", "<unk>", "<0x41>", "\u00e9\u4e2d\U0001f600", "e\u0301", "\ufeff"),
    *("\u2028\x85\x0b\x0c", "2024", "it's I'LL", f"a{END_OF_TEXT}b", "  a  ", " \t\r\n"),
]
WORDS = [
    *("the", "of", "and", "a", "house", "river", "mountain", "walked"),
    *("said", "never", "17", "where's", "promised", "letter", "old"),
]


def sentences(num: int = 200) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(num)]


def prose() -> list[str]:
    draw = random.Random(0)
    words = ["the", "of", "and", "a", "house", "river", "it's", "we'll", "went", "1999", "\u00c9mile", "\u4e2d"]
    return [" ".join(draw.choices(words, k=12)) + draw.choice([".\n", "!\n\n", " "]) for _ in range(200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_sentencepiece(sentences(), directory, vocab_size=VOCAB_SIZE)
    return directory


@pytest.fixture(scope="module")
def pairs() -> BytePairTokenizer:
    return train_byte_pairs(prose(), vocab_size=300)


@pytest.fixture(scope="module", params=["sentencepiece", "bytes", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, trained: Path, pairs: BytePairTokenizer) -> Tokenizer:
    return {"sentencepiece": load_tokenizer(trained), "bytes": BytesTokenizer(), "gpt2": pairs}[request.param]


def texts() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*AWKWARD, *sentences(3)]) | st.text(max_size=8), max_size=8).map("".join)


def assert_lossless(tokenizer: Tokenizer, text: str) -> None:
    """And ids take two bytes, and hold no BOS, which is decoded as nothing."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos_id, *ids]) == text
    assert ids.dtype == tokenizer.dtype == np.uint16
    assert tokenizer.bos_id not in ids and all(ids < tokenizer.vocab_size)


@settings(max_examples=200, deadline=None)
@given(text=texts())
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert_lossless(tokenizer, text)


def test_awkward_text_is_lossless_alone(tokenizer: Tokenizer) -> None:
    for text in ["", *AWKWARD]:
        assert_lossless(tokenizer, text)


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


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "bytes"], indirect=True)
def test_lines_are_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    """But by GPT-2's, which cuts a newline as the text after it says."""
    lines = [f"{line}\n" for line in sentences(20)]
    whole = tokenizer.encode("".join(lines))
    assert np.array_equal(whole, np.concatenate([tokenizer.encode(line) for line in lines]))
    assert all(piece == b"\n" for piece in tokenizer.pieces if b"\n" in piece)


def test_sampled_training_depends_on_its_seed_alone(tmp_path: Path) -> None:
    def fingerprint(run: str, seed: int) -> str:
        made = train_sentencepiece(sentences(), tmp_path / run, vocab_size=VOCAB_SIZE, max_sentences=20, seed=seed)
        return made.fingerprint

    assert fingerprint("a", 1) == fingerprint("b", 1) != fingerprint("c", 2)


def test_long_lines_are_trained_on_too(tmp_path: Path) -> None:
    line = " ".join(sentences(2000))  # 100 kB; SentencePiece by itself skips lines above its limit
    assert "river" in train_sentencepiece([line], tmp_path, vocab_size=VOCAB_SIZE).decode(range(VOCAB_SIZE))


def test_a_model_that_would_lose_text_is_refused() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    with refused(ValueError, "no BOS"):
        SentencePieceTokenizer(model.getvalue())


@pytest.mark.parametrize(("vocab_size", "beyond"), [(9000, 1), (100, -1)])
def test_no_text_or_a_vocabulary_of_the_wrong_size_is_refused_with_the_size_that_is_possible(
    tmp_path: Path, vocab_size: int, beyond: int
) -> None:
    with refused(ValueError, "vocab_size") as refusal:
        train_sentencepiece(sentences(), tmp_path, vocab_size=vocab_size)
    possible = int(str(refusal.value).split()[-1])
    assert train_sentencepiece(sentences(), tmp_path, vocab_size=possible).vocab_size == possible
    with pytest.raises(ValueError, match=f"possible value is {possible}"):
        train_sentencepiece(sentences(), tmp_path, vocab_size=possible + beyond)
    for lines in ([], ["\u2585, which SentencePiece skips"] * 9, ["\0" * 9] * 9):
        with refused(ValueError, "holds no text"):
            train_sentencepiece(lines, tmp_path)
    with refused(ValueError, "vocab_size 1 "):
        train_sentencepiece(sentences(), tmp_path, vocab_size=1)
    for text, size in (("a", 256), ("ab ab", 5000)):
        with refused(ValueError, "vocab_size", size):
            train_byte_pairs([text], vocab_size=size)


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


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: (path / "tokenizer.json").unlink(), "json is missing"),
    "not json": (lambda path: (path / "tokenizer.json").write_text("{"), "json is damaged"),
    "newer": (lambda path: edit_json(path, format_version=2), "json has format_version 2"),
    "unknown kind": (lambda path: edit_json(path, kind="letters"), "json: unknown kind 'letters'"),
    "other tokenizer": (lambda path: edit_json(path, fingerprint="0"), "model is another tokenizer"),
    "no model": (lambda path: (path / "tokenizer.model").unlink(), "model is missing"),
    "cut model": (lambda path: (path / "tokenizer.model").write_bytes(b"\x0a\x99"), "model is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tokenizer_is_refused_by_name(trained: Path, tmp_path: Path, damage: str) -> None:
    save_tokenizer(load_tokenizer(trained), tmp_path)
    harm, named = DAMAGE[damage]
    harm(tmp_path)
    with refused(ValueError, f"{tmp_path}/tokenizer.{named}"):
        load_tokenizer(tmp_path)


# GPT-2's byte pairs


def test_without_the_library_an_error_names_the_extra_and_blames_no_file(
    pairs: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(pairs, tmp_path)
    write_byte_pairs(pairs, tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(UnusableError, "dist-mem[hf]") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_ids_are_those_of_the_library_and_of_transformers(tmp_path: Path, pairs: BytePairTokenizer) -> None:
    """Read back from vocab.json and merges.txt by its own byte-level BPE; merges are used, and newlines seen whole."""
    write_byte_pairs(pairs, tmp_path)
    theirs = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in [*AWKWARD, *prose(), "".join(prose())]:
        assert pairs.encode(text).tolist() == theirs.encode(text).ids
    assert len(pairs.encode(" the house")) == 2
    gpt2 = pytest.importorskip("transformers", reason="transformers is not installed").GPT2Tokenizer
    theirs = gpt2.from_pretrained(tmp_path)
    for text in [text for text in AWKWARD if END_OF_TEXT not in text] + prose():
        assert pairs.encode(text).tolist() == theirs(text)["input_ids"]
    assert theirs.bos_token_id == pairs.bos_id == pairs.vocab_size - 1


def test_the_command_trains_and_a_dataset_is_built_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By two worker processes; what is in the shards decodes to the texts."""
    texts = ["".join(prose()[number::4]) for number in range(4)]
    folder, trained = tmp_path / "texts", tmp_path / "tok"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="\r\n")  # as PG-19's
    program = [sys.executable, "-m", "dist_mem.datasets.gpt2_tokenizer", str(folder)]
    command = [*program, "--vocab-size", "300", "--out", str(trained)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stderr
    assert "300 tokens" in done.stdout
    documents = [SourceDocument(str(number), "t", folder / f"{number}.txt") for number in range(4)]
    build_dataset({"test": documents}, tmp_path / "data", name="x", tokenizer=find_tokenizer(trained), workers=2)
    assert [document.text for document in documents_of(tmp_path / "data", "test")] == texts
    again = [str(folder), "--out", str(trained), "--vocab-size"]
    assert gpt2_tokenizer.main([*again, "299"]) == 2
    said(capsys.readouterr().err, trained / "tokenizer.json", "--out")
    assert [piece for piece in load_tokenizer(trained).pieces if b"\r" in piece] == [b"\r"], "no token is of CRLF"
    assert gpt2_tokenizer.main([*again, "300"]) == 0


# Fast tokenizers


LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
MAKE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": BytesTokenizer,
    "words": lambda: WordTokenizer(["<unk>", *count_words(LINES).words[:200]]),
    "gpt2": lambda: train_byte_pairs(LINES, vocab_size=600),
    "sentencepiece": lambda: train_pieces(LINES, vocab_size=600),
}


def many_texts() -> Iterator[str]:
    """Pages, random texts of few letters, and every character of the Basic Multilingual Plane that UTF-8 has."""
    yield from ["", "\n".join(LINES), "<s> </s> <unk> <0x41> <eos> <|endoftext|> \u2581\u2581 \U0001f600 \x00"]
    yield " ".join(f"a{chr(code)}b" for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    draw = random.Random(0)
    for letters in ("ab ", "aab\n ", "the memory \n", "aaaa", " \t\n\r\x0b\x1c\x85\u2028ab", "\u00e9\u2581 <s>x"):
        yield from ("".join(draw.choices(letters, k=draw.randint(0, 60))) for _ in range(50))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {HuggingFaceTokenizer.kind}))  # which has its own files
def test_ids_and_texts_are_those_of_the_tokenizer(kind: str) -> None:
    tokenizer = MAKE[kind]()
    fast = fast_tokenizer(tokenizer, adds_bos=True)
    fast.encode_special_tokens = True  # as with `split_special_tokens` in tokenizer_config.json
    assert fast_tokenizer(tokenizer, adds_bos=False).encode("a").ids == tokenizer.encode("a").tolist()
    for text in many_texts():
        ids = tokenizer.encode(text).tolist()
        assert fast.encode(text).ids == [tokenizer.bos_id, *ids], text
        assert fast.decode(ids) == tokenizer.decode(ids)


def test_words_that_a_vocabulary_lacks_are_an_error_there_too_and_bos_is_no_word() -> None:
    tokenizer = WordTokenizer(["<s>", "a"])
    fast = fast_tokenizer(tokenizer, adds_bos=True)
    assert bos_token(tokenizer) == "<<s>>"
    assert fast.encode("a <s>").ids == [2, 1, 0]
    with refused(Exception, "Missing [UNK] token"):
        fast.encode("b")


def test_a_unigram_model_is_refused() -> None:
    with refused(ValueError, "not BPE"):
        fast_tokenizer(train_pieces(LINES, vocab_size=500, model_type="unigram"), adds_bos=True)


# One token a word


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
    with refused(ValueError, "the word 'b'"):
        WordTokenizer(["a"]).encode("a b")


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""]])
def test_what_is_no_vocabulary_is_refused(words: list[str]) -> None:
    with refused(ValueError, "the vocabulary has"):
        WordTokenizer(words)


def test_a_data_directory_keeps_it(tmp_path: Path) -> None:
    tokenizer = count_words(TEXT.splitlines())
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer.words").write_text("other\n")
    with refused(ValueError, "tokenizer.json", "another tokenizer"):
        load_tokenizer(tmp_path)

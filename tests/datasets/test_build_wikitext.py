"""WikiText as shards: counts and order of the published preparation, from the official files and from tiny ones."""

from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import Index, read_index, read_tokens
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from tests.support.data_builders import build_data, build_refused, documents_of

TRAIN = (
    " \n = Lobster = \n \n The lobster , or <unk> , is blue . \n \n = = Diet = = \n \n It eats the crab . \n \n"
    " = The Crab = \n \n A formula is \n = 1 henry = \n or \n = 1 rad = \n \n and in a table \n \n"
    " = 2 rad = \n and the crab is red . \n \n"
)
TEXTS = {
    "train": TRAIN,
    "valid": " \n = Valid = \n \n The crab is blue . \n \n",
    "test": " \n = T = \n \n the <unk> \n",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files in the format of WikiText."""
    folder = tmp_path / "source"
    folder.mkdir()
    for split, text in TEXTS.items():
        (folder / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    return folder


def build(source: Path, out: Path, *options: str) -> int:
    return build_data("wikitext", "--source", source, "--out", out, *options)


def refuse(source: Path, out: Path, *options: str, named: str) -> None:
    build_refused("wikitext", "--source", source, "--out", out, *options, named=(named,))


def stream_of(index: Index) -> np.ndarray:
    """The tokens of all documents end to end, as the layout `stream` reads them."""
    return np.concatenate([read_tokens(index, number) for number in range(len(index.documents))])


def published_words(text: str) -> list[str]:
    """As the published code cuts a file: the words of each line, and <eos>."""
    return [word for line in text.split("\n")[:-1] for word in [*line.split(), "<eos>"]]


def test_line_ends_of_windows_which_hide_articles_are_refused(source: Path, tmp_path: Path) -> None:
    path = source / "wiki.valid.tokens"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    refuse(source, tmp_path / "out", named=str(path))


@pytest.mark.parametrize("documents", ["articles", "split"])
def test_the_stream_of_words_is_that_of_the_published_preparation(source: Path, tmp_path: Path, documents: str) -> None:
    assert build(source, tmp_path / "out", "--documents", documents, "--workers", "2") == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        index, words = read_index(tmp_path / "out" / split), published_words(TEXTS[name])
        ids = {word: token for token, word in enumerate(tokenizer.words)}  # type: ignore[attr-defined]
        assert stream_of(index).tolist() == [ids.get(word, ids["<unk>"]) for word in words]
        assert index.num_words == index.official_words == index.num_tokens == len(words)
    assert not verify_dataset(tmp_path / "out")


def test_articles_begin_at_their_headings_alone(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "out") == 0
    found = documents_of(tmp_path / "out")
    assert [document.entry.title for document in found] == ["Lobster", "The Crab"]  # no section, and no formula
    assert found[1].text.startswith("= The Crab = ")
    assert load_tokenizer(tmp_path / "out").words[:2] == ["<eos>", "="]  # type: ignore[attr-defined] # by frequency


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_a_byte_order_mark_hides_no_heading_and_is_no_text(source: Path, tmp_path: Path, tokenizer: str) -> None:
    """As an editor may put before a file that begins with its first heading."""
    for split, text in TEXTS.items():
        (source / f"wiki.{split}.tokens").write_text(text.removeprefix(" \n"), encoding="utf-8")
    assert build(source, tmp_path / "plain", "--tokenizer", tokenizer) == 0
    for split, text in TEXTS.items():
        (source / f"wiki.{split}.tokens").write_text(text.removeprefix(" \n"), encoding="utf-8-sig")
    assert build(source, tmp_path / "marked", "--tokenizer", tokenizer) == 0
    for split in ("train", "validation", "test"):
        plain, marked = (read_index(tmp_path / out / split) for out in ("plain", "marked"))
        assert marked.documents == plain.documents
        assert np.array_equal(stream_of(marked), stream_of(plain))
    assert plain.documents[0].title == "T"


def test_pieces_are_divided_by_the_words_of_the_papers(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "out", "--tokenizer", "bytes") == 0
    index = read_index(tmp_path / "out" / "test")
    assert index.num_tokens == len(TEXTS["test"].encode())
    assert index.num_words == len(published_words(TEXTS["test"]))
    assert load_tokenizer(tmp_path / "out").decode(stream_of(index)) == TEXTS["test"]  # nothing is lost


def test_without_the_train_file_a_vocabulary_must_be_given(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "whole") == 0
    (source / "wiki.train.tokens").unlink()
    for options in ((), ("--tokenizer", "sentencepiece")):
        refuse(source, tmp_path / "out", *options, named="wiki.train.tokens")
    assert build(source, tmp_path / "out", "--tokenizer-from", str(tmp_path / "whole")) == 0
    for split in ("validation", "test"):
        assert read_index(tmp_path / "out" / split).fingerprint == read_index(tmp_path / "whole" / split).fingerprint


def test_what_is_no_wikitext_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tmp_path / "out", named="wiki.train.tokens")
    for content in (b"caf\xe9 \n", b"", "the river\n".encode("utf-16-le")):
        (source / "wiki.test.tokens").write_bytes(content)
        refuse(source, tmp_path / "out", named="wiki.test.tokens")


@pytest.mark.parametrize("corpus", ["wikitext-103", "wikitext-2"])
def test_the_official_files_have_the_published_counts(
    shared_data: Path, tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shared_data / "data" / corpus
    assert build(source, tmp_path / "bytes", "--tokenizer", "bytes") == 0
    assert "as published for WikiText" in capsys.readouterr().out
    for split, count in (("validation", 217_646), ("test", 245_569)):
        index = read_index(tmp_path / "bytes" / split)
        assert (index.num_words, len(index.documents)) == (count, 60)  # both sets have 60 articles


def test_official_words_are_tokens_and_a_cut_train_file_is_refused(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official, source, other = shared_data / "data" / "wikitext-2", tmp_path / "source", tmp_path / "train"
    source.mkdir()
    other.mkdir()
    for name in ("valid", "test"):  # as train both, so that the vocabulary knows all words: what train itself does
        text = (official / f"wiki.{name}.tokens").read_bytes()
        (source / f"wiki.{name}.tokens").write_bytes(text)
        with (other / "wiki.train.tokens").open("ab") as stream:
            stream.write(text)
    assert build(other, tmp_path / "words") == 0
    assert "there are no counts to compare with" in capsys.readouterr().out
    assert build(source, tmp_path / "out", "--tokenizer-from", str(tmp_path / "words")) == 0
    for split, count in (("validation", 217_646), ("test", 245_569)):
        assert read_index(tmp_path / "out" / split).num_tokens == count
    (source / "wiki.train.tokens").write_bytes((other / "wiki.train.tokens").read_bytes())
    refuse(source, tmp_path / "cut", named="has 463,215 words with <eos>, but WikiText-2 has 2,088,628")

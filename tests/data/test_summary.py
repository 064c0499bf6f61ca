"""What `dist-mem data show` and `sample` print of a dataset, and what they refuse."""

import re
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.data.shard import read_index


def test_show_prints_the_sizes_of_every_split(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(books)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokenizer bytes, " in lines[0]
    for line, split in zip(lines[2:], ("test", "train", "validation"), strict=True):
        index = read_index(books / split)
        name, documents, tokens, words = line.replace(",", "").split()[:4]
        assert (name, int(documents), int(tokens), int(words)) == (
            split, len(index.documents), index.num_tokens, index.num_words,
        )  # fmt: skip
    assert main(["data", "show", str(books), "--split", "test"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_samples_are_passages_of_different_documents(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(*options: str) -> str:
        assert main(["data", "sample", str(books), "--tokens", "30", *options]) == 0
        return capsys.readouterr().out

    text = sample("--documents", "5")
    assert text == sample("--documents", "5") != sample("--documents", "5", "--seed", "1")
    found = re.findall(r"^== (\d+), Book \d+: tokens ([\d,]+) to ([\d,]+) of [\d,]+\n(.*)$", text, re.MULTILINE)
    assert len({book for book, *_ in found}) == 5
    for book, begin, end, shown in found:
        assert int(end.replace(",", "")) - int(begin.replace(",", "")) == 29  # both are in the passage
        assert shown in (books.parent / "texts" / "train" / f"{book}.txt").read_text(encoding="utf-8")
    assert len(re.findall("^== ", sample("--documents", "99"), re.MULTILINE)) == len(
        read_index(books / "train").documents
    )


@pytest.mark.parametrize("action", ["show", "sample"])
def test_a_split_that_is_not_there_is_named_with_the_others(
    books: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", action, str(books), "--split", "tset"]) == 2
    assert "has no split 'tset': it has test, train, validation; did you mean test?" in capsys.readouterr().err

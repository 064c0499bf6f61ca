"""The sample library: readable books, and recall spans that say exactly what must be remembered, and from where."""

import re
from collections import Counter
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import read_index
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets.recipes import sample
from dist_mem.datasets.recipes.sample import SIZES, write_split
from dist_mem.datasets.sample_library import COMPANY_SIZE, NAMES, THINGS, SampleBook
from dist_mem.runtime.files import write_text
from tests.support.data_builders import build_data, build_refused, documents_of
from tests.support.small_builds import contents

MARK = re.compile(r"\w+|[^\w ]")  # what a large enough vocabulary makes one token of


@pytest.fixture(scope="module")
def books() -> list[SampleBook]:
    return list(write_split("validation", 8, SIZES["demo"], seed=0).values())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    assert build(out) == 0
    return out


def build(out: Path, *options: str) -> int:
    return build_data("sample", "--out", str(out), "--size", "tiny", *options)


def chapters(book: SampleBook) -> list[tuple[int, int]]:
    """First and last character of each chapter."""
    starts = [match.start() for match in re.finditer(r"^(Chapter \d+|The End)$", book.text, re.MULTILINE)]
    return list(pairwise(starts))


def distances(book: SampleBook) -> list[int]:
    """Of all recall spans, in words, marks and newlines."""
    number = {match.start(): place for place, match in enumerate(MARK.finditer(book.text))}
    return [number[span.start] - number[span.referent] for span in book.recall]


def test_a_recall_span_is_a_word_and_its_referent_the_same_word_after_the_same_cue(books: list[SampleBook]) -> None:
    for book in books:
        for start, stop, referent in book.recall:
            word = book.text[start:stop]
            cue = book.text[:start].split()[-1]
            assert re.fullmatch(r"[A-Za-z]+", word)
            latest = book.text.rfind(f" {cue} {word}", 0, start - len(cue) - 1)
            assert referent == latest + len(cue) + 2


def test_a_fact_is_reported_once_before_it_is_recalled_and_recalled_ever_after(books: list[SampleBook]) -> None:
    for book in books:
        recalled = {span.start for span in book.recall}
        for first, last in chapters(book):
            for deed in THINGS:
                reported = [match.end() + 1 for match in re.finditer(rf" {deed}(?= )", book.text[first:last])]
                assert [first + place in recalled for place in reported] == [False] + [True] * (len(reported) - 1)


def test_a_chapter_has_one_thing_of_each_kind_and_one_surname_for_each_name(books: list[SampleBook]) -> None:
    for book in books:
        assert 2_000 <= len(MARK.findall(book.text)) <= 21_000
        for first, last in chapters(book):
            chapter = book.text[first:last]
            for deed, things in THINGS.items():
                found = set(re.findall(rf" {deed} (\w+)", chapter))
                assert len(found) == 1
                assert found <= set(things)
            people = set(re.findall(rf"({'|'.join(NAMES)}) (\w+)", chapter))
            assert len(people) == len(dict(people)) == 2 + COMPANY_SIZE


def test_every_band_of_distance_has_thousands_of_recalls_in_the_validation_split() -> None:
    size = SIZES["demo"]
    library = write_split("validation", size.books["validation"], size, seed=0).values()
    found = np.array([distance for book in library for distance in distances(book)])
    assert (found <= 64).sum() > 10_000
    assert ((found > 64) & (found <= 64 + 192)).sum() > 5_000
    assert (found > 64 + 192).sum() > 2_000


def test_books_read_as_sentences_in_chapters(books: list[SampleBook]) -> None:
    for book in books:
        title, _, rest = book.text.partition("\n\n")
        assert book.title.startswith(title)
        assert "  " not in rest and " ." not in rest
        for paragraph in rest.strip().split("\n\n"):
            if not re.fullmatch(r"Chapter \d+|The End", paragraph):
                assert re.fullmatch(r"[A-Z][^.]*\.( [A-Z][^.]*\.)*", paragraph)


def test_facts_of_different_books_are_independent(books: list[SampleBook]) -> None:
    promises = {re.search(r"Once (.*)\.", book.text)[1] for book in books}  # type: ignore[index]
    first_meals = Counter(re.search(r" ate (\w+)", book.text)[1] for book in books)  # type: ignore[index]
    assert len(promises) == len(books)
    assert max(first_meals.values()) <= 4


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_library(built: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again", "--workers", "2") == 0
    assert contents(tmp_path / "again") == contents(built)
    assert build(tmp_path / "other", "--seed", "1", "--books", "4") == 0
    assert contents(tmp_path / "other" / "texts" / "test") != contents(built / "texts" / "test")


def test_more_books_than_there_are_ids_are_refused(tmp_path: Path) -> None:
    build_refused("sample", "--out", tmp_path, "--books", "7001", named=("--books 7001", "7000"))


def test_more_books_leave_the_others_as_they_are(built: Path) -> None:
    more = write_split("train", 20, SIZES["tiny"], seed=0)
    assert len(more) == 20
    for path in (built / "texts" / "train").glob("*.txt"):
        assert more[path.stem].text == path.read_text()


def test_shards_verify_and_every_recalled_word_is_one_token(built: Path) -> None:
    assert verify_dataset(built) == []
    tokenizer = load_tokenizer(built)
    library = write_split("train", SIZES["tiny"].books["train"], SIZES["tiny"], seed=0)
    for entry, _, tokens, _, recall in documents_of(built):
        book = library[entry.id]
        words = [tokenizer.decode([token]) for token in tokens[recall > 0]]
        assert words == [f" {book.text[span.start : span.stop]}" for span in book.recall]
        places = np.flatnonzero(recall)
        assert (tokens[places] == tokens[places - recall[places]]).all()


def test_texts_are_in_the_layout_that_build_pg19_reads(built: Path, tmp_path: Path) -> None:
    options = ["--source", str(built / "texts"), "--out", str(tmp_path), "--tokenizer-from", str(built)]
    assert build_data("pg19", *options) == 0
    for split in ("train", "validation", "test"):
        ours, theirs = read_index(built / split), read_index(tmp_path / split)
        facts = attrgetter("id", "title", "year", "num_tokens", "words")
        assert list(map(facts, ours.documents)) == list(map(facts, theirs.documents))


def test_another_library_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, "--books", "5") == 0
    before = contents(tmp_path)
    assert build(tmp_path, "--books", "4") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert build(tmp_path, "--books", "4", "--overwrite") == 0
    assert len(list((tmp_path / "texts" / "train").iterdir())) == 4


@pytest.mark.parametrize("name", ["train/my_novel.txt", "train/1001.txt", "test/7.txt", "metadata.csv"])
def test_texts_of_something_else_are_refused_and_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out" / "texts" / name
    path.parent.mkdir(parents=True)
    path.write_text("1001,My novel,1999,https://example.org/1001\n")
    build_refused("sample", "--out", tmp_path / "out", "--size", "tiny", "--overwrite", named=(path, "--out"))
    assert contents(tmp_path / "out") == {f"texts/{name}": path.read_bytes()}


def test_a_library_that_was_killed_among_its_texts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: str) -> None:
        if path.stem == "8002":
            raise KeyboardInterrupt
        write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(sample, "write_text", write)
        assert build(tmp_path, "--books", "5") == 130
    assert build(tmp_path, "--books", "4", "--seed", "1", "--overwrite") == 0
    assert len(list((tmp_path / "texts").glob("*/*.txt"))) == 4 + 4 + 4

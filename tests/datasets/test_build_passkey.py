"""The passkey task and RULER's needles: the published texts, only the answer scored, distances to the needle."""

import random
import re
from collections.abc import Iterator
from itertools import islice, pairwise, product
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.tokenizers.registry import load_tokenizer, save_tokenizer
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import task_text
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.recipes.passkey import PASSKEY, RULER, Form, Needle, compose
from dist_mem.datasets.source import SourceDocument
from dist_mem.datasets.task_text import REPEATED, Books, cut_sentences
from dist_mem.errors import UnusableError
from tests.support.data_builders import build_data, build_refused, documents_of
from tests.support.messages import refused

SMALL = ("--train", "12", "--validation", "6", "--test", "6")
SPLITS = ("train", "validation", "test")
GARBAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def build(out: Path, *options: str) -> int:
    return build_data("passkey", "--out", str(out), *SMALL, *options)


def numbers_in(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def published_passkey(num_before: int, num_after: int, pass_key: int) -> str:
    """Landmark attention's prompt, for garbage cut at the ends of sentences."""
    garbage = " ".join([GARBAGE] * 50)
    ends = [0, *(match.end() for match in re.finditer(r"\.", garbage))]
    return "\n".join(
        [
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
            "you about the important information there.",
            garbage[: ends[num_before]],
            f"The pass key is {pass_key}. Remember it. {pass_key} is the pass key.",
            garbage[: ends[num_after]],
            "What is the pass key? The pass key is",
        ]
    )


@pytest.mark.parametrize(("depth", "before"), [(0.0, 0), (0.5, 6), (0.999, 12)])
def test_the_passkey_prompt_is_the_published_one(depth: float, before: int) -> None:
    sentences = (REPEATED * 3)[:12]
    form = Form(PASSKEY, 1, 1, 50_000)
    question = compose([Needle("", "71432", depth)], sentences, form=form, reads_on=False)
    assert question.text == published_passkey(before, 12 - before, 71432) + " 71432"
    assert question.text[question.referent :].startswith("71432 is the pass key.")


def test_rulers_prompt_is_the_published_one() -> None:
    needles = [Needle("tall-cup", "7654321", 0.5), Needle("iron-key", "1234567", 0.1)]
    question = compose(needles, [GARBAGE] * 3, form=Form(RULER, 2, 10**6, 10**7 - 1), reads_on=False)
    assert question.text == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
        "One of the special magic numbers for iron-key is: 1234567.\n"
        f"{GARBAGE}\n{GARBAGE}\n"
        "One of the special magic numbers for tall-cup is: 7654321.\n"
        f"{GARBAGE}\n"
        "What is the special magic number for tall-cup mentioned in the provided text? The special magic number for "
        "tall-cup mentioned in the provided text is 7654321"
    )
    assert question.text[question.referent :].startswith("7654321.\n")
    essay = compose(needles, ["One.", "Two."], form=Form(RULER, 2, 10**6, 10**7 - 1), reads_on=True).text
    assert "iron-key is: 1234567. One. One of the" in essay


@pytest.mark.parametrize(
    "options", [["--lengths", "700", "900"], ["--form", "ruler", "--needles", "8", "--lengths", "1500"]]
)
def test_only_the_answer_is_scored_and_recall_leads_to_the_needle(tmp_path: Path, options: list[str]) -> None:
    assert build(tmp_path, *options) == 0
    for data_dir in tmp_path.iterdir():
        assert verify_dataset(data_dir) == []
        for split in SPLITS:
            for _, text, tokens, mask, recall in documents_of(data_dir, split):
                assert 0 <= int(data_dir.name) - len(tokens) < 130, "as long as one sentence more"
                answer = numbers_in(text)[-1]
                scored = np.flatnonzero(mask)
                assert scored.tolist() == list(range(len(text) - len(answer), len(text)))  # bytes
                needle = scored[0] - recall[scored[0]]
                assert text[needle:].startswith(answer)
                assert (scored - recall[scored] == needle).all()
                assert not recall[~mask].any()
                if "ruler" in options:
                    key = re.search(r"for (\S+) mentioned", text)[1]  # type: ignore[index]
                    found = dict(re.findall(r"numbers for (\S+) is: (\d{7})\.", text))
                    assert len(found) == 8
                    assert found[key] == answer


def test_depths_are_uniform_and_no_number_is_in_two_splits(tmp_path: Path) -> None:
    sizes = ("--lengths", "2000", "--train", "200", "--validation", "40", "--test", "40")
    assert build(tmp_path, *sizes, "--digits", "3") == 0
    found, depths = {}, []
    for split in SPLITS:
        texts = [document.text for document in documents_of(tmp_path / "2000", split)]
        found[split] = {numbers_in(text)[-1] for text in texts}
        depths += [text.index("The pass key") / len(text) for text in texts]
    assert sum(map(len, found.values())) == len(set.union(*found.values()))
    assert all(number.isdecimal() and len(number) == 3 for number in set.union(*found.values()))
    assert np.histogram(depths, bins=4, range=(0, 1))[0].min() > 45
    assert {number[-1] for number in found["train"]} == set("0123456789"), "training has every digit"


def test_books_fill_documents_of_their_own_split_only(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    for split in SPLITS:
        for number in range(2):
            (folder / split).mkdir(parents=True, exist_ok=True)
            sentences = [f"{split.title()} {number}\nsays {place}." for place in range(40)]
            (folder / split / f"{number}.txt").write_text("\n\n".join(sentences), encoding="utf-8")
    assert build(tmp_path / "out", "--lengths", "1200", "--books", str(folder)) == 0
    starts = set()
    for split in SPLITS:
        for document in documents_of(tmp_path / "out" / "1200", split):
            places = re.findall(r"(\w+) (\d) says (\d+)\.", document.text)
            assert {place[0] for place in places} == {split.title()}
            starts.add(places[0])
            for one, other in pairwise(places):
                assert other[2] == "0" or (one[:2], int(one[2]) + 1) == (other[:2], int(other[2])), "in order"
    assert len(starts) > 10


def test_books_without_folders_are_dealt_out_by_their_names(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("One. Two.", encoding="utf-8")
    dealt = Books(tmp_path, SPLITS).paths
    assert sum(map(len, dealt.values())) == 60
    assert min(map(len, dealt.values())) >= 1
    (tmp_path / "new.txt").write_text("One.", encoding="utf-8")
    assert all(set(dealt[split]) <= set(Books(tmp_path, SPLITS).paths[split]) for split in SPLITS)


def test_documents_of_many_books_cut_each_book_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 32 books, nearly every document cut a whole one again."""
    for split, number in product(SPLITS, range(50)):
        (tmp_path / split).mkdir(exist_ok=True)
        text = "\n" + "".join(f"{split} {number}\nsays {place}.\n\n" for place in range(300))
        (tmp_path / split / f"{number}.txt").write_text(text, encoding="utf-8")
    cut, inner = [], task_text._cut

    def _cut(text: str) -> Iterator[tuple[int, str]]:
        cut.append(len(text))
        return inner(text)

    monkeypatch.setattr(task_text, "_cut", _cut)
    books = Books(tmp_path, SPLITS)
    for seed in range(300):
        place = int(random.Random(seed).random() * 300)
        one, *others = islice(books.sentences("train", random.Random(seed)), 301)
        book = one.removesuffix(f"says {place}.")
        assert others[: 299 - place] == [f"{book}says {number}." for number in range(place + 1, 300)]
        assert [sentence.split()[-1] for sentence in others[299 - place :]] == [f"{n}." for n in range(place + 1)]
    assert sum(cut) <= 2 * sum(path.stat().st_size for path in books.paths["train"])


def test_a_book_without_text_is_passed_over_unless_all_are(tmp_path: Path) -> None:
    """PG-19 has one, with which a build ended in its middle."""
    for split, number in product(SPLITS, range(3)):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"{number}.txt").write_text("One. Two." if number == 1 and split != "test" else " \n")
    books = Books(tmp_path, SPLITS)
    for seed in range(20):
        assert {*islice(books.sentences("train", random.Random(seed)), 9)} == {"One.", "Two."}
    with refused(UnusableError, tmp_path / "test", "--books"):
        next(books.sentences("test", random.Random(0)))


def test_sentences_end_at_marks_with_their_quotation_marks() -> None:
    text = 'One.  "Two\nwords!" Three?\n\nTitle\n\nFour'
    assert cut_sentences(text) == ["One.", '"Two words!"', "Three?", "Title", "Four"]


def test_another_tokenizer_gives_as_many_of_its_tokens(tmp_path: Path) -> None:
    documents = [SourceDocument("1", "1", f"{GARBAGE} The pass key is 12345. Remember it. 67890\n" * 40)]
    build_dataset({"train": documents}, tmp_path / "text", name="text", vocab_size=330)
    assert build(tmp_path / "out", "--lengths", "400", "--tokenizer-from", str(tmp_path / "text")) == 0
    tokenizer = load_tokenizer(tmp_path / "out" / "400")
    assert tokenizer.fingerprint == load_tokenizer(tmp_path / "text").fingerprint
    for _, text, tokens, mask, _ in documents_of(tmp_path / "out" / "400"):
        assert 380 < len(tokens) <= 400
        assert tokenizer.decode(tokens[mask]).strip() == numbers_in(text)[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--lengths", "100"), "--lengths 100"),
        (("--needles", "2"), "--needles 2"),
        (("--form", "ruler", "--needles", "9"), "--needles 9"),
        (("--form", "ruler", "--needles", "4", "--digits", "2"), "--digits 2"),
        (("--lengths", "400", "--tokenizer-from", "words"), "of the answer"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, options: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(WordTokenizer(["<unk>", "the"]), Path("words"))  # which cannot spell the answer
    build_refused("passkey", "--out", "out", *SMALL, *options, named=(named,))

"""BABILong from bAbI's own files: each question with the facts before it, in its split, whatever the task."""

from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.verify import verify_dataset
from dist_mem.datasets.babi_files import read_stories
from dist_mem.datasets.split_names import SPLITS
from tests.support.data_builders import build_data, build_refused, documents_of

ROOMS = ("attic", "cellar", "porch", "shed")


def story(number: int, split: str) -> str:
    """Two questions, the second after another fact; of which the answer of the first is no longer right."""
    first, second = ROOMS[number % 4], ROOMS[(number + 1) % 4]
    who = f"Ann{split}{number}"
    lines = (
        *(f"1 {who} went to the {first}.", "2 Bob slept."),
        *(f"3 Where is {who}? \t{first}\t1", f"4 {who} went to the {second}.", f"5 Where is {who}? \t{second}\t4"),
    )
    return "".join(f"{line}\n" for line in lines)


def write_babi(folder: Path, *, valid: bool = False) -> Path:
    folder.mkdir()
    for split in ("train", "test", *(["valid"] if valid else [])):
        text = "".join(story(number, split) for number in range(20))
        (folder / f"qa7_counting_{split}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("valid", [True, False])
def test_every_question_has_the_facts_before_it_and_the_place_that_answers(tmp_path: Path, valid: bool) -> None:
    folder = write_babi(tmp_path / "en", valid=valid)
    sizes = ("--lengths", "700", "--train", "8", "--validation", "4", "--test", "4")
    options = ("--babi", folder, "--tasks", "qa7", *sizes)
    assert build_data("babilong", "--out", tmp_path / "out", *options) == 0
    data, people = tmp_path / "out" / "qa7" / "700", dict[str, set[str]]()
    assert verify_dataset(data) == []
    for split in SPLITS:
        for entry, text, tokens, mask, recall in documents_of(data, split):
            expected = text.rpartition(" ")[2]
            who = entry.title.partition("Where is ")[2].partition("?")[0]
            assert text.count(f"{who} went to the") == (2 if "(3 facts)" in entry.title else 1)
            fact = f"{who} went to the {expected}."
            assert bytes(tokens[mask].astype(np.uint8)).decode() == expected
            assert (np.flatnonzero(mask) - recall[mask] == text.rindex(fact)).all()  # a token is a byte
            people.setdefault(split, set()).add(who)
    assert not people["train"] & people["validation"] and not people["train"] & people["test"]
    own = "valid" if valid else "train"
    assert all(who.startswith(f"Ann{own}") for who in people["validation"])


def test_the_number_of_facts_chooses_the_questions(tmp_path: Path) -> None:
    folder = write_babi(tmp_path / "en")
    assert {len(found.facts) for found in read_stories(folder, "qa7", "test")} == {2, 3}
    assert {len(found.facts) for found in read_stories(folder, "qa7", "test", (3, 9))} == {3}
    options = ("--babi", folder, "--tasks", "qa7", "--facts", "7", "9", "--out", tmp_path / "out")
    build_refused("babilong", *options, named=(folder, "--facts"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("x", "line 1"),
        ("1 Ann slept.\n2 Where? \tattic\t7", "Where?"),
        ("1 Ann slept.\n2 Where? \tattic\tx", "Where?"),
        ("1 Where? \tattic\t1", "Where?"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, line: str, named: str) -> None:
    folder = write_babi(tmp_path / "en")
    path = folder / "qa7_counting_test.txt"
    path.write_text(line, encoding="utf-8")
    options = ("--tasks", "qa7", "--out", tmp_path / "out")
    build_refused("babilong", "--babi", folder, *options, named=(path, named))
    path.unlink()
    build_refused("babilong", "--babi", folder, *options, named=(folder, "en-10k"))
    build_refused("babilong", *options, named=("qa7", "--babi"))
    assert not (tmp_path / "out").exists()

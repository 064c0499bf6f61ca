"""Stories of bAbI's own files (Weston et al. 2015): tasks qa1 to qa20, as `tasks_1-20_v1-2/en-10k` has them.

A file is qa1_single-supporting-fact_train.txt, .._test.txt, and in `en-valid-10k` .._valid.txt; without the last, the
validation split is the last tenth of the stories for training. A line is a number and a fact, or a number, a question,
its answer and the numbers of the facts from which it follows, divided by tabs; number 1 begins another story. A
question stands after some facts of its story, and refers to these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_mem.datasets.babi_stories import Story
from dist_mem.datasets.source import read_text
from dist_mem.errors import UnusableError

TASKS = tuple(f"qa{number}" for number in range(1, 21))
_ENDINGS = {"train": "train", "validation": "valid", "test": "test"}
_HELD_OUT = 10  # one of so many stories, where no file is for validation


def read_stories(folder: Path, task: str, split: str, num_facts: tuple[int, int] | None = None) -> list[Story]:
    """Return the questions of a task and a split.

    Args:
        num_facts: fewest and most facts of a story; None: any number.

    Raises:
        UnusableError: there is no such file or more than one, it is damaged, or no story has so many facts.
    """
    path, has_own = _file_of(folder, task, split)
    stories = _parse(path)
    if split != "test" and not has_own:
        held_out = len(stories) - max(len(stories) // _HELD_OUT, 1)
        stories = stories[:held_out] if split == "train" else stories[held_out:]
    low, high = num_facts or (1, max((len(found.facts) for story in stories for found in story), default=1))
    found = [question for story in stories for question in story if low <= len(question.facts) <= high]
    if not found:
        raise UnusableError(f"{path}: no question of {split} has {low} to {high} facts: give other --facts")
    return found


def checksum(folder: Path, task: str) -> str:
    """Return the SHA-256 of the files of a task that are read."""
    paths = {_file_of(folder, task, split)[0] for split in _ENDINGS}
    return hashlib.sha256("".join(read_text(path) for path in sorted(paths)).encode()).hexdigest()


def _file_of(folder: Path, task: str, split: str) -> tuple[Path, bool]:
    """Return the file of a split, and whether validation has one of its own."""
    found = {name: sorted(folder.glob(f"{task}_*_{ending}.txt")) for name, ending in _ENDINGS.items()}
    has_own = bool(found["validation"])
    name = "train" if split == "validation" and not has_own else split
    if len(found[name]) != 1:
        raise UnusableError(
            f"--babi {folder}: must hold one file {task}_*_{_ENDINGS[name]}.txt, but holds {len(found[name])}: give "
            "the folder en-10k or en-valid-10k of bAbI's tasks_1-20_v1-2"
        )
    return found[name][0], has_own


def _parse(path: Path) -> Sequence[Sequence[Story]]:
    """Return the questions of every story of a file."""
    return [list(_questions(path, lines)) for lines in _stories(path)]


def _stories(path: Path) -> Iterator[list[tuple[str, str]]]:
    story: list[tuple[str, str]] = []
    for place, line in enumerate(read_text(path).splitlines(), start=1):
        number, _, rest = line.partition(" ")
        if not number.isdecimal() or not rest.strip():
            raise UnusableError(f"{path}, line {place}: {line!r} is no number with a fact or a question")
        if int(number) == 1 and story:
            yield story
            story = []
        story.append((number, rest.strip()))
    if story:
        yield story


def _questions(path: Path, lines: Sequence[tuple[str, str]]) -> Iterator[Story]:
    facts: list[str] = []
    places: dict[str, int] = {}  # number of a line -> fact
    for number, text in lines:
        if "\t" not in text:
            places[number] = len(facts)
            facts.append(text)
            continue
        question, answer, *named = (part.strip() for part in text.split("\t"))
        support = " ".join(named).split()
        if not answer or not facts or any(each not in places for each in support):
            raise UnusableError(f"{path}: {question!r} has no answer, or names facts that do not stand before it")
        yield Story(list(facts), question, answer, sorted(places[each] for each in support) or [len(facts) - 1])

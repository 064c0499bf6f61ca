"""Build BABILong (Kuratov et al. 2024): facts hidden in a long text, and a question.

    dist-mem data build babilong --out data/babilong --tasks qa1 qa2 --lengths 1000 4000 16000
    dist-mem data build babilong --out data/babi_books --books pg19 --tokenizer-from data/pg19
    dist-mem data build babilong --out data/babi --babi tasks_1-20_v1-2/en-10k --tasks qa1 qa20

Stories are those of bAbI's files (--babi, qa1 to qa20), as published, or follow its rules and need
no download (qa1 to qa5). Their facts are in order, at uniformly random places, between sentences of
--books (published: PG-19) or of the sample library. The question and the answer end the document.
Only the tokens of the answer are scored; their recall distance is that to the newest fact
from which it follows. Lengths are at most those given, up to 1 million tokens and more; tokens are
bytes, or those of --tokenizer-from. No story with its question of one split is in another, but
where bAbI's files have it twice. Each task and length has its own data directory,
<out>/<task>/<length>. The same options always produce the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.shard import TokenizedDocument
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.datasets import babi_files
from dist_mem.datasets.babi_stories import FEWEST_FACTS, NUM_FACTS, Story, draw_story
from dist_mem.datasets.options import check_paths, positive
from dist_mem.datasets.split_names import SPLITS
from dist_mem.datasets.task_text import (
    Books,
    Haystack,
    Library,
    Question,
    Task,
    add_task_options,
    add_text_options,
    build_tasks,
    document_of,
    draw_of_split,
    fit_question,
    tokenizer_of,
)

MAX_DRAWS = 1_000  # of a story that fits into the length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_task_options(parser, out="data/babilong", lengths=4000)
    add = parser.add_argument
    tasks = babi_files.TASKS
    add("--tasks", choices=tasks, nargs="+", default=["qa1"], metavar="TASK", help="qa1 to qa20 (default: qa1)")
    add("--babi", type=Path, metavar="DIR", help="take the stories of bAbI's files, of any task; else qa1 to qa5")
    ranges = ", ".join(f"{task} {low} {high}" for task, (low, high) in NUM_FACTS.items())
    help = f"fewest and most facts of a story (default: {ranges}; any number with --babi)"
    add("--facts", type=positive, nargs=2, metavar=("LOW", "HIGH"), help=help)
    add_text_options(parser)


def build(options: argparse.Namespace) -> None:
    """Build a data directory for each task and length."""
    check_paths(options.books, options.babi)
    tokenizer = tokenizer_of(options.tokenizer_from)
    haystack: Haystack = Library() if options.books is None else Books(options.books, SPLITS)
    if options.facts and options.facts[0] > options.facts[1]:
        raise ValueError(f"--facts {options.facts[0]} {options.facts[1]}: the fewest come first")
    num_facts = tuple(options.facts) if options.facts else None
    sources = {
        name: published_stories(options.babi, name, num_facts) if options.babi else own_stories(name, num_facts)
        for name in options.tasks
    }
    tasks = (
        (babilong_task(name, stories, haystack, tokenizer, length, seed=options.seed), options.out / name / str(length))
        for name, stories in sources.items()
        for length in options.lengths
    )
    build_tasks(tasks, options)


class StorySource(NamedTuple):
    """Where the stories of a task come from."""

    recipe: str  # two sources of one recipe have the same stories
    draw: Callable[[random.Random, str], Story]  # of a split


def own_stories(task: str, num_facts: tuple[int, int] | None) -> StorySource:
    """Return stories by the rules of bAbI. Raises ValueError for a task that only its files have."""
    if task not in NUM_FACTS:
        raise ValueError(f"--tasks {task}: only {', '.join(NUM_FACTS)} are made here; give bAbI's files with --babi")
    low, high = num_facts or NUM_FACTS[task]
    fewest, most = FEWEST_FACTS[task], 2 if task == "qa4" else high
    if high < fewest or low > most:
        needs = f"{fewest} facts" if task == "qa4" else f"at least {fewest} facts"
        raise ValueError(f"--facts {low} {high}: a story of {task} has {needs}: give others, or leave --facts out")

    def draw_of(draw: random.Random, split: str) -> Story:
        return draw_of_split(split, lambda: draw_story(draw, task, (low, high)), key_of)

    return StorySource(f"{task} facts {low} to {high}", draw_of)


def published_stories(folder: Path, task: str, num_facts: tuple[int, int] | None) -> StorySource:
    """Return the stories of bAbI's files. Raises UnusableError if they cannot be used."""
    stories = {split: babi_files.read_stories(folder, task, split, num_facts) for split in SPLITS}
    limits = f" facts {num_facts[0]} to {num_facts[1]}" if num_facts else ""
    recipe = f"{task} of bAbI {babi_files.checksum(folder, task)}{limits}"
    return StorySource(recipe, lambda draw, split: draw.choice(stories[split]))


def babilong_task(
    name: str, stories: StorySource, haystack: Haystack, tokenizer: Tokenizer, length: int, *, seed: int
) -> Task:
    """Return the task for documents of one length."""

    def documents(split: str) -> Iterator[TokenizedDocument]:
        for number in count(1):
            draw = random.Random(f"dist_mem babilong {seed} {name} {length} {split} {number}")
            yield document_of(draw_question(draw, split), number, tokenizer)

    def draw_question(draw: random.Random, split: str) -> Question:
        for _ in range(MAX_DRAWS):
            story = stories.draw(draw, split)
            depths = sorted(draw.random() for _ in story.facts)
            question = fit_question(partial(compose, story, depths), haystack.sentences(split, draw), tokenizer, length)
            if question is not None:
                return question
        raise ValueError(f"--lengths {length}: {MAX_DRAWS} stories of {name} have more tokens; give fewer --facts")

    recipe = f"babilong {stories.recipe} in {haystack.name} length {length} "
    return Task("babilong", recipe + f"count {{count}} seed {seed}", tokenizer, documents, texts=haystack.texts)


def key_of(story: Story) -> str:
    """Return the facts and the question."""
    return " ".join([*story.facts, story.question])


def compose(story: Story, depths: Sequence[float], sentences: Sequence[str]) -> Question:
    """Return a story whose facts stand among the sentences, at `depths` from 0 to 1, in rising order."""
    parts: list[str] = []
    newest, end, start = max(story.support), 0, 0
    for number, (fact, depth) in enumerate(zip(story.facts, depths, strict=True)):
        place = int(depth * (len(sentences) + 1))
        parts += sentences[end:place]
        end = place
        if number == newest:
            start = sum(len(part) + 1 for part in parts)
        parts.append(fact)
    text = " ".join([*parts, *sentences[end:], story.question, story.answer])
    title = f"{story.question} ({len(story.facts)} facts)"
    return Question(text, story.answer, start, title)

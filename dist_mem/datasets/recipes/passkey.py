"""Build the passkey task and RULER's needles: a number in a long text, asked for at its end.

    dist-mem data build passkey --out data/passkey --lengths 1000 4000 16000
    dist-mem data build passkey --out data/needles --form ruler --needles 4 --books pg19
    dist-mem data build passkey --out data/passkey_short --lengths 400 --digits 2 --train 20000

--form passkey is the prompt of Mohtashami and Jaggi 2023 (Landmark attention): one number, up to
50,000. --form ruler is that of Hsieh et al. 2024 (RULER): 1 to 8 needles, each a key and a number
of 7 digits; the question is about one of them. The haystack is their repeated sentences, or the
sentences of --books, read on from any one. The depth of a needle is uniform over the text. Only the
tokens of the answer are scored; their recall distance is that to the number in the needle. Lengths
are at most those given; tokens are bytes, or those of --tokenizer-from. No number of one split is
in another. Each length has its own data directory, <out>/<length>. The same options always produce
the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from dist_mem.data.shard import TokenizedDocument
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.datasets.options import check_paths, positive
from dist_mem.datasets.sample_library import MATERIALS, TREASURES
from dist_mem.datasets.split_names import SPLITS
from dist_mem.datasets.task_text import (
    REPEATED,
    Books,
    Haystack,
    Question,
    Repeat,
    Task,
    add_task_options,
    add_text_options,
    build_tasks,
    document_of,
    draw_of_split,
    fit_question,
    tokenizer_of,
)

PASSKEY, RULER = "passkey", "ruler"
MAX_NEEDLES = 8
PASSKEY_NUMBERS = (1, 50_000)  # published; RULER's have 7 digits
RULER_DIGITS = 7
PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
PASSKEY_NEEDLE = "The pass key is {number}. Remember it. {number} is the pass key."
PASSKEY_QUESTION = "What is the pass key? The pass key is"
RULER_TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards."
)
RULER_NEEDLE = "One of the special magic numbers for {key} is: {number}."
RULER_QUESTION = (
    "What is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)


class Needle(NamedTuple):
    key: str  # "" in the passkey task
    number: str
    depth: float  # from 0 to 1


class Form(NamedTuple):
    """The settings of a task, except its length."""

    kind: str
    num_needles: int
    smallest: int  # number
    largest: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_task_options(parser, out="data/passkey", lengths=4000)
    add = parser.add_argument
    add("--form", choices=(PASSKEY, RULER), default=PASSKEY, help="of the text (default: %(default)s)")
    add("--needles", type=positive, default=1, metavar="N", help=f"of ruler: 1 to {MAX_NEEDLES} (default: 1)")
    add("--digits", type=positive, metavar="N", help="of a number (default: as published, see above)")
    add_text_options(parser)


def build(options: argparse.Namespace) -> None:
    """Build a data directory for each length."""
    check_paths(options.books)
    form, tokenizer = form_of(options), tokenizer_of(options.tokenizer_from)
    haystack: Haystack = Repeat(" ".join(REPEATED)) if form.kind == RULER else Repeat(*REPEATED)
    if options.books is not None:
        haystack = Books(options.books, SPLITS)
    tasks = (
        (passkey_task(form, haystack, tokenizer, length, seed=options.seed), options.out / str(length))
        for length in options.lengths
    )
    build_tasks(tasks, options)


def form_of(options: argparse.Namespace) -> Form:
    """Return the form that the options describe. Raises ValueError if there is none."""
    if options.needles > (MAX_NEEDLES if options.form == RULER else 1):
        raise ValueError(
            f"--needles {options.needles}: --form ruler has 1 to {MAX_NEEDLES}, and passkey, whose needle has no key, 1"
        )
    smallest, largest = PASSKEY_NUMBERS
    if options.form == RULER or options.digits:
        digits = options.digits or RULER_DIGITS
        smallest, largest = 10 ** (digits - 1), 10**digits - 1
    if (largest - smallest) // 100 < options.needles - 1:
        raise ValueError(
            f"--digits {options.digits}: too few numbers for --needles {options.needles}; give more digits"
        )
    return Form(options.form, options.needles, smallest, largest)


def passkey_task(form: Form, haystack: Haystack, tokenizer: Tokenizer, length: int, *, seed: int) -> Task:
    """Return the task for documents of one length."""

    def documents(split: str) -> Iterator[TokenizedDocument]:
        for number in count(1):
            draw = random.Random(f"dist_mem passkey {seed} {length} {split} {number}")
            needles = draw_needles(draw, form, split)
            text = partial(compose, needles, form=form, reads_on=not isinstance(haystack, Repeat))
            question = fit_question(text, haystack.sentences(split, draw), tokenizer, length)
            if question is None:
                raise ValueError(f"--lengths {length}: the needles and the question alone have more tokens")
            yield document_of(question, number, tokenizer)

    numbers = f"{form.num_needles} of {form.smallest} to {form.largest}"
    recipe = (
        f"passkey form {form.kind} needles {numbers} in {haystack.name} length {length} count {{count}} seed {seed}"
    )
    return Task("passkey", recipe, tokenizer, documents, texts=haystack.texts)


def draw_needles(draw: random.Random, form: Form, split: str) -> list[Needle]:
    """Draw needles with different keys and numbers; the question is about the first one."""
    keys = {"": ""} if form.kind == PASSKEY else {}
    while len(keys) < form.num_needles:
        # RULER's keys are an adjective and a noun of the package wonderwords; these are words of the sample library
        key = f"{draw.choice(MATERIALS)}-{draw.choice(TREASURES)}"
        keys[key] = key
    numbers: list[str] = []
    while len(numbers) < form.num_needles:
        number = draw_of_split(split, lambda: str(draw.randint(form.smallest, form.largest)), str)
        if number not in numbers:
            numbers.append(number)
    return [Needle(key, number, draw.random()) for key, number in zip(keys, numbers, strict=True)]


def compose(needles: Sequence[Needle], sentences: Sequence[str], *, form: Form, reads_on: bool) -> Question:
    """Return the published prompt with these sentences, and its answer.

    Args:
        reads_on: after the passkey's needle, the text goes on; published, for the repeated sentences: begins again.
    """
    asked = needles[0]
    title = f"{asked.key or 'pass key'} at {asked.depth:.0%}" + (f", one of {len(needles)}" if needles[1:] else "")
    if form.kind == PASSKEY:
        place = int(asked.depth * (len(sentences) + 1))
        after = sentences[place:] if reads_on else sentences[: len(sentences) - place]
        needle = PASSKEY_NEEDLE.format(number=asked.number)
        lines = [PASSKEY_TASK, " ".join(sentences[:place]), needle, " ".join(after), PASSKEY_QUESTION]
        text = "\n".join(lines)
        sentence = f"{asked.number} is the pass key."
    else:
        lines = list(sentences)
        for needle_ in sorted(needles, key=lambda needle: needle.depth, reverse=True):
            sentence = RULER_NEEDLE.format(key=needle_.key, number=needle_.number)
            lines.insert(int(needle_.depth * (len(sentences) + 1)), sentence)
        separator = " " if reads_on else "\n"  # published: essays are joined by spaces, the repeated lines by line ends
        text = "\n".join([RULER_TASK, separator.join(lines), RULER_QUESTION.format(key=asked.key)])
        sentence = RULER_NEEDLE.format(key=asked.key, number=asked.number)
    referent = text.index(sentence) + sentence.index(asked.number)
    return Question(f"{text} {asked.number}", asked.number, referent, title)

"""A procedural library of readable books, with words that are predictable only from earlier pages.

In every book, one person keeps a promise. Each chapter draws a few people and things: one village, one inn, one beast
and so on. A thing that is mentioned again ("fed the mule") and the surname after a first name can be predicted only
from their latest mention; so can the words of the promise, with which every chapter begins. The positions of each such
word and of its latest mention are recorded (`RecallSpan`).

After each mention, the gap to the next one is drawn from GAPS. So many words recall a mention within one segment of 64
tokens, many one within a memory of the 192 tokens before it, and many one farther back.

Nearly everything is drawn per chapter because a lane reads one book for many steps: the weights would soon memorise
what stays the same in a whole book, and the model would not learn to use its memory (docs/log,
2026-11-20).

The pools of words are small and the words plain on purpose: each word is one token of a vocabulary of 1280 pieces, and
occurs often enough for a small model to learn it within minutes. A deed directly precedes its thing, and no two deeds
share a thing, so the previous token is enough to look up the thing.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_mem.datasets.source import RecallSpan


class Gap(NamedTuple):
    share: float  # of all mentions
    shortest: int  # tokens
    longest: int  # tokens


class SampleBook(NamedTuple):
    title: str
    year: int
    text: str
    recall: list[RecallSpan]


class Person(NamedTuple):
    name: str
    surname: str


class Promise(NamedTuple):
    """The subject of a book, the same on all its pages."""

    hero: Person
    home: str
    material: str
    treasure: str
    friend: Person
    friend_home: str


GAPS = (Gap(0.50, 6, 60), Gap(0.42, 66, 185), Gap(0.08, 260, 350))
COMPANY_SIZE = 4  # people of a chapter
CHAPTER_LEN = 560  # tokens, about
PROMISE_GAP = 265  # tokens after which a chapter repeats the promise: beyond the reach of a memory of 192
NUM_SENTENCES = (4, 6)  # of a paragraph
NUM_DEEDS = (3, 4)  # of a sentence
PAUSE_SHARE = 0.04  # share of the sentences that recall nothing


@dataclass
class Page:
    """The text written so far, its length, and the latest mention of each fact."""

    parts: list[str] = field(default_factory=list)
    num_chars: int = 0
    num_tokens: int = 0  # words, marks and newlines
    latest: dict[Hashable, int] = field(default_factory=dict)  # fact -> first character of its latest mention
    recall: list[RecallSpan] = field(default_factory=list)

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.num_chars += len(text)
        self.num_tokens += len(re.findall(r"\w+|[^\w ]", text))

    def mention(self, fact: Hashable, word: str) -> None:
        """Write a space and the word of a fact; it is a recall if the fact was mentioned before."""
        start = self.num_chars + 1
        if fact in self.latest:
            self.recall.append(RecallSpan(start, start + len(word), self.latest[fact]))
        self.latest[fact] = start
        self.write(f" {word}")


class Schedule:
    """Schedule of the next mention of each of a chapter's people or things."""

    def __init__(self, keys: Iterable[str], draw: random.Random, *, start: int, num_resting: int) -> None:
        self.draw = draw
        self.resting: deque[str] = deque(maxlen=num_resting)  # taken most recently; may not be taken again yet
        self.due = {key: start + draw.randrange(GAPS[0].longest) for key in keys}  # in tokens of the page

    def take(self, position: int) -> str:
        """Take the key with the earliest due position; `position` is the current length of the page."""
        key = min((key for key in self.due if key not in self.resting), key=self.due.__getitem__)
        self.resting.append(key)
        gap = self.draw.choices(GAPS, [gap.share for gap in GAPS])[0]
        self.due[key] = position + self.draw.randint(gap.shortest, gap.longest)
        return key


def write_book(draw: random.Random, *, num_tokens: int) -> SampleBook:
    """Write a book of about `num_tokens` words, punctuation marks and newlines."""
    people = _draw_people(draw, 2)
    homes = draw.sample(HOMES, 2)
    promise = Promise(people[0], homes[0], draw.choice(MATERIALS), draw.choice(TREASURES), people[1], homes[1])
    author = _draw_people(draw, 1, others=people)[0]
    page = Page()
    page.write("The Promise of")
    _write_person(page, promise.hero)
    title = f"{''.join(page.parts)} by {author.name} {author.surname}"
    page.write("\n\n")
    chapter = 0
    while page.num_tokens < num_tokens:
        chapter += 1
        page.write(f"Chapter {chapter}\n\n")
        _write_promise(page, promise, "Once" if chapter == 1 else "Still", "promised" if chapter == 1 else "meant")
        _write_chapter(page, draw, chapter, promise)
    page.write("The End\n\n")
    _write_promise(page, promise, "Then", "came")
    return SampleBook(title, draw.randrange(1800, 1900), "".join(page.parts), page.recall)


def _draw_people(draw: random.Random, count: int, *, others: Iterable[Person] = ()) -> list[Person]:
    """Draw people whose names differ from each other's and from those of `others`."""
    names = [name for name in NAMES if all(name != other.name for other in others)]
    surnames = [surname for surname in SURNAMES if all(surname != other.surname for other in others)]
    return [Person(*pair) for pair in zip(draw.sample(names, count), draw.sample(surnames, count), strict=True)]


def _write_person(page: Page, person: Person, *, of: Hashable = "the book") -> None:
    page.write(f" {person.name}")
    page.mention((of, person.name), person.surname)


def _write_promise(page: Page, promise: Promise, opener: str, verb: str) -> None:
    """Write, for example: Still Mara Holt of Dunwick meant to bring the copper lantern to Tom Reed of Poole."""
    page.write(opener)
    _write_person(page, promise.hero)
    page.write(" of")
    page.mention("home", promise.home)
    page.write(f" {verb} to bring the")
    page.mention("material", promise.material)
    page.mention("treasure", promise.treasure)
    page.write(" to")
    _write_person(page, promise.friend)
    page.write(" of")
    page.mention("friend's home", promise.friend_home)
    page.write(".\n\n")


def _write_chapter(page: Page, draw: random.Random, chapter: int, promise: Promise) -> None:
    end = page.num_tokens + CHAPTER_LEN
    company = {
        person.name: person for person in _draw_people(draw, COMPANY_SIZE, others=(promise.hero, promise.friend))
    }
    things = {deed: draw.choice(choices) for deed, choices in THINGS.items()}
    people_due = Schedule(company, draw, start=page.num_tokens, num_resting=1)
    things_due = Schedule(things, draw, start=page.num_tokens, num_resting=NUM_DEEDS[1])
    middle = page.num_tokens + PROMISE_GAP
    while page.num_tokens < end:
        if page.num_tokens > middle:
            _write_promise(page, promise, "Still", "meant")
            middle = end
        page.write(draw.choice(TIMES))  # so that no name begins a line, where it would be another token
        for _ in range(draw.randint(*NUM_SENTENCES)):
            _write_person(page, company[people_due.take(page.num_tokens)], of=chapter)
            num_deeds = draw.randint(*NUM_DEEDS)
            for place in range(num_deeds):
                deed = things_due.take(page.num_tokens)
                page.write(f"{_joint(place, num_deeds)} {deed}")
                page.mention((chapter, deed), things[deed])
            page.write(".")
            if draw.random() < PAUSE_SHARE:
                page.write(f" {draw.choice(PAUSES)}")
        page.write("\n\n")


def _joint(place: int, count: int) -> str:
    """Return the separator before item `place` of an enumeration of `count`."""
    if place == 0:
        return ""
    return " and" if place == count - 1 else ","


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = {  # deed -> its possible objects
    "ate": _words("bacon bread cheese ham honey mutton pie plums porridge soup toast trout"),
    "built": _words("arches barns boats bridges huts kilns mills ovens sheds stairs towers walls"),
    "burned": _words("alder ash beech birch cedar elm hazel maple oak peat pine willow"),
    "caught": _words("bees crabs eels flies hares herring mice moths pike salmon shrimps toads"),
    "drank": _words("ale beer brandy broth cider cocoa mead milk perry tea water wine"),
    "feared": _words("dogs fog frost ghosts hail ice mist rain snow storms thunder wolves"),
    "fed": _words("bulls calves colts ducks geese goats hens horses lambs mules oxen pigs"),
    "grew": _words("barley beans carrots corn hemp hops leeks lettuce oats onions peas turnips"),
    "heard": _words("bells crows cuckoos gulls herons larks magpies owls robins rooks thrushes wrens"),
    "mended": _words("boots carts chairs clocks fences gates hats nets roofs saddles tools wheels"),
    "picked": _words("asters clover daisies fern iris ivy lilies mallow poppies roses thistles violets"),
    "played": _words("bowls cards chess darts dice dominoes draughts drums flutes marbles quoits whist"),
    "reached": _words("Alton Ashby Barton Corby Denby Fenton Hadley Linton Malton Norby Oakley Selby"),
    "read": _words("fables letters maps news novels plays poems psalms riddles sermons tales verses"),
    "sold": _words("baskets brooms buttons candles chalk needles nails pots ribbons ropes salt spices"),
    "wore": _words("cotton felt flannel fur lace leather linen satin silk straw tweed wool"),
}

NAMES = _words("Ada Anna Basil Bram Clara Dora Edgar Flora Giles Hugh Jane Lucy Mara Nora Ruth Tom")
SURNAMES = _words("Barrow Blake Cobb Crane Drake Frost Hale Holt Knox Marsh Penn Reed Shaw Thorn Vane Webb")
HOMES = _words("Bristol Cromer Dover Dunwick Exeter Harwich Oxford Poole Romney Rye Wells Whitby")
MATERIALS = _words("amber brass bronze copper crystal golden iron ivory oaken pewter silver velvet")
TREASURES = _words("bowl box candle coin comb cup key knife lantern locket ring spoon")

TIMES = ("In the morning", "At noon", "After that", "Before dark", "In the evening", "The next day", "Later")
PAUSES = ("Nobody spoke for a while.", "The road was long and white.", "So the day went by.", "It was very quiet.")

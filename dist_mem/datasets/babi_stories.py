"""Stories and questions by the rules of bAbI tasks 1 to 5 (Weston et al. 2015, sec. 3), from our own generator.

A world of people, rooms and things is simulated; every fact is one sentence. Where anybody or anything is at first is
not stated, as published. A question is asked only if the facts answer it, and its supporting facts are known.

    qa1  Where is Mary?                              the last move of a person
    qa2  Where is the football?                      who has it or left it, and where that person was then
    qa3  Where was the football before the kitchen?  the same, one room earlier
    qa4  What is north of the kitchen?               two rooms beside a third
    qa5  Who did Fred give the milk to?              the last such gift
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # of qa5
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("journeyed to", "moved to", "travelled to", "went back to", "went to")
TAKES = ("got", "grabbed", "picked up", "took")
DROPS = ("discarded", "dropped", "left", "put down")
GIVES = ("gave", "handed", "passed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
THERE = 0.3  # share of takes and drops that end with "there"
# Facts of a story; in BABILong, they are up to 10, 68, 320, 2 and 126
NUM_FACTS = {"qa1": (2, 10), "qa2": (3, 20), "qa3": (5, 40), "qa4": (2, 2), "qa5": (2, 20)}
FEWEST_FACTS = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 2, "qa5": 2}  # of which a question can be asked


class Story(NamedTuple):
    facts: list[str]
    question: str
    answer: str
    support: list[int]  # facts that the answer follows from


class Stay(NamedTuple):
    """A room that a thing is known to be in, and the facts that state it."""

    room: str
    first: list[int]  # when it came there
    newest: list[int]


class Gift(NamedTuple):
    giver: str
    thing: str
    receiver: str
    fact: int


class StoryWorld:
    """People, rooms and things, and what the facts have stated of them so far."""

    def __init__(self, draw: random.Random, people: tuple[str, ...]) -> None:
        self.draw = draw
        self.facts: list[str] = []
        self.rooms = {who: draw.choice(ROOMS) for who in people}  # the truth, stated or not
        self.thing_rooms = {thing: draw.choice(ROOMS) for thing in THINGS}  # likewise
        self.holders: dict[str, str] = {}  # thing -> person
        self.taken: dict[str, int] = {}  # thing -> the fact that states the holder
        self.moved: dict[str, int] = {}  # person -> the fact that states the room
        self.stays: dict[str, list[Stay]] = {thing: [] for thing in THINGS}
        self.gifts: list[Gift] = []

    def move(self) -> bool:
        who = self.draw.choice(tuple(self.rooms))
        room = self.draw.choice([room for room in ROOMS if room != self.rooms[who]])
        self.moved[who] = self._state(f"{who} {self.draw.choice(MOVES)} the {room}")
        self.rooms[who] = room
        for thing in [thing for thing, holder in self.holders.items() if holder == who]:
            self.thing_rooms[thing] = room
            self._note_room(thing, [self.taken[thing], self.moved[who]])
        return True

    def take(self) -> bool:
        """Let somebody take a thing; False if nobody can."""
        free = [thing for thing in THINGS if thing not in self.holders]
        can = [(who, thing) for who, room in self.rooms.items() for thing in free if self.thing_rooms[thing] == room]
        if not can:
            return False
        who, thing = self.draw.choice(can)
        self.taken[thing] = self._state(f"{who} {self.draw.choice(TAKES)} the {thing}{self._there()}")
        self.holders[thing] = who
        self._note_person(thing, who, self.taken[thing])
        return True

    def drop(self) -> bool:
        """Let somebody leave a thing; False if nobody has one."""
        if not self.holders:
            return False
        thing = self.draw.choice(sorted(self.holders))
        who = self.holders.pop(thing)
        dropped = self._state(f"{who} {self.draw.choice(DROPS)} the {thing}{self._there()}")
        self._note_person(thing, who, dropped)
        return True

    def give(self) -> bool:
        """Let somebody give a thing to a person in the same room; False if nobody can."""
        can = [
            (giver, thing, receiver)
            for thing, giver in sorted(self.holders.items())
            for receiver, room in self.rooms.items()
            if receiver != giver and room == self.rooms[giver]
        ]
        if not can:
            return False
        giver, thing, receiver = self.draw.choice(can)
        self.taken[thing] = self._state(f"{giver} {self.draw.choice(GIVES)} the {thing} to {receiver}")
        self.holders[thing] = receiver
        self.gifts.append(Gift(giver, thing, receiver, self.taken[thing]))
        return True

    def _state(self, fact: str) -> int:
        self.facts.append(f"{fact}.")
        return len(self.facts) - 1

    def _there(self) -> str:
        return " there" if self.draw.random() < THERE else ""

    def _note_person(self, thing: str, who: str, fact: int) -> None:
        """Note that `who` has or had a thing where the facts say that one of both is; else the room is not stated."""
        if who in self.moved:
            self._note_room(thing, [self.moved[who], fact])
        elif self.stays[thing]:
            self._note_room(thing, [*self.stays[thing][-1].newest, fact])

    def _note_room(self, thing: str, support: list[int]) -> None:
        stays, room, support = self.stays[thing], self.thing_rooms[thing], sorted(set(support))
        if stays and stays[-1].room == room:
            stays[-1] = stays[-1]._replace(newest=support)
        else:
            stays.append(Stay(room, support, support))


def draw_story(draw: random.Random, task: str, num_facts: tuple[int, int]) -> Story:
    """Draw a story of a task, with a number of facts between two limits; of qa4, it is always two."""
    story_of = STORIES[task]
    while True:
        story = story_of(draw, draw.randint(*num_facts))
        if story is not None:
            return story


def _person(draw: random.Random, num_facts: int) -> Story | None:
    world = StoryWorld(draw, PEOPLE)
    for _ in range(num_facts):
        world.move()
    who = draw.choice(sorted(world.moved))
    return Story(world.facts, f"Where is {who}?", world.rooms[who], [world.moved[who]])


def _ask_for_thing(draw: random.Random, num_facts: int) -> Story | None:
    world = StoryWorld(draw, PEOPLE)
    _act(world, num_facts, {StoryWorld.move: 0.5, StoryWorld.take: 0.3, StoryWorld.drop: 0.2})
    known = [thing for thing in THINGS if world.stays[thing]]
    if not known:
        return None
    thing = draw.choice(known)
    stay = world.stays[thing][-1]
    return Story(world.facts, f"Where is the {thing}?", stay.room, stay.newest)


def _ask_for_thing_before(draw: random.Random, num_facts: int) -> Story | None:
    world = StoryWorld(draw, PEOPLE)
    _act(world, num_facts, {StoryWorld.move: 0.6, StoryWorld.take: 0.3, StoryWorld.drop: 0.1})
    asked = [
        (thing, before, after)
        for thing, stays in world.stays.items()
        for before, after in pairwise(stays)
        if [stay.room for stay in stays].count(after.room) == 1  # else "before the kitchen" is not one time
    ]
    if not asked:
        return None
    thing, before, after = draw.choice(asked)
    support = sorted({*before.first, *after.first})
    return Story(world.facts, f"Where was the {thing} before the {after.room}?", before.room, support)


def _ask_beside(draw: random.Random, num_facts: int) -> Story | None:
    middle, *others = draw.sample(ROOMS, 3)
    facts, asked = [], []
    for number, (room, way) in enumerate(zip(others, draw.sample(sorted(OPPOSITE), 2), strict=True)):
        one, other, side = (room, middle, way) if draw.random() < 0.5 else (middle, room, OPPOSITE[way])
        facts.append(f"The {one} is {side} of the {other}.")
        asked += [
            (f"What is {way} of the {middle}?", room, number),
            (f"What is {OPPOSITE[way]} of the {room}?", middle, number),
            (f"What is the {middle} {OPPOSITE[way]} of?", room, number),
            (f"What is the {room} {way} of?", middle, number),
        ]
    question, answer, number = draw.choice(asked)
    return Story(facts, question, answer, [number])


def _gift(draw: random.Random, num_facts: int) -> Story | None:
    world = StoryWorld(draw, GIVERS)
    _act(world, num_facts, {StoryWorld.move: 0.3, StoryWorld.take: 0.2, StoryWorld.drop: 0.1, StoryWorld.give: 0.4})
    newest: dict[str, tuple[str, int]] = {}  # a later gift that answers the same question replaces an earlier one
    for giver, thing, receiver, fact in world.gifts:
        newest[f"What did {giver} give to {receiver}?"] = thing, fact
        newest[f"Who gave the {thing} to {receiver}?"] = giver, fact
        newest[f"Who did {giver} give the {thing} to?"] = receiver, fact
        newest[f"Who gave the {thing}?"] = giver, fact
        newest[f"Who received the {thing}?"] = receiver, fact
    if not newest:
        return None
    question, (answer, fact) = draw.choice(sorted(newest.items()))
    return Story(world.facts, question, answer, [fact])


def _act(world: StoryWorld, num_facts: int, shares: dict[Callable[[StoryWorld], bool], float]) -> None:
    """State so many facts; who cannot do what is drawn moves."""
    actions, weights = list(shares), list(shares.values())
    while len(world.facts) < num_facts:
        action = world.draw.choices(actions, weights)[0]
        if not action(world):
            world.move()


STORIES: dict[str, Callable[[random.Random, int], Story | None]] = {
    "qa1": _person,
    "qa2": _ask_for_thing,
    "qa3": _ask_for_thing_before,
    "qa4": _ask_beside,
    "qa5": _gift,
}

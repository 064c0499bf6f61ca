"""A reader of bAbI's stories 1 to 5 that knows only their sentences: it answers from the text, sentence by sentence."""

from __future__ import annotations

import re
from typing import NamedTuple

MOVE = re.compile(r"(\w+) (?:journeyed to|moved to|travelled to|went back to|went to) the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:got|grabbed|picked up|took) the (\w+)(?: there)?\.")
DROP = re.compile(r"(\w+) (?:discarded|dropped|left|put down) the (\w+)(?: there)?\.")
GIVE = re.compile(r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\.")
BESIDE = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
THINGS = ("apple", "football", "milk")


class Read(NamedTuple):
    """What the facts say, in the order in which they are read."""

    person_room: dict[str, str]
    thing_rooms: dict[str, list[str]]  # each one after another
    gifts: list[tuple[str, str, str]]
    cells: dict[str, tuple[int, int]]  # rooms on a grid


def read_facts(facts: list[str]) -> Read:
    """Read the facts. A thing is where its holder is; where it was left, it stays."""
    read, holder = Read({}, {thing: [] for thing in THINGS}, [], {}), dict[str, str]()

    def see(thing: str) -> None:
        room = read.person_room.get(holder[thing])
        if room is None and read.thing_rooms[thing]:  # taken where it is known to lie
            return
        if room is not None and read.thing_rooms[thing][-1:] != [room]:
            read.thing_rooms[thing].append(room)

    for fact in facts:
        if found := MOVE.fullmatch(fact):
            read.person_room[found[1]] = found[2]
        elif found := TAKE.fullmatch(fact):
            assert found[2] not in holder, f"{fact} But {holder[found[2]]} has it."
            holder[found[2]] = found[1]
        elif found := DROP.fullmatch(fact):
            assert holder.get(found[2]) == found[1], f"{fact} But {holder.get(found[2])} has it."
            see(found[2])
            del holder[found[2]]
        elif found := GIVE.fullmatch(fact):
            assert holder.get(found[2]) == found[1], f"{fact} But {holder.get(found[2])} has it."
            rooms = [read.person_room.get(found[1]), read.person_room.get(found[3])]
            assert None in rooms or rooms[0] == rooms[1], f"{fact} But they are in {rooms}."
            holder[found[2]] = found[3]
            read.gifts.append((found[1], found[2], found[3]))
        elif found := BESIDE.fullmatch(fact):
            _place(read.cells, found[1], STEPS[found[2]], found[3])
        else:
            raise AssertionError(f"{fact!r} is no fact")
        for thing in holder:
            see(thing)
    return read


def _place(cells: dict[str, tuple[int, int]], one: str, step: tuple[int, int], other: str) -> None:
    if other not in cells and one in cells:
        cells[other] = (cells[one][0] - step[0], cells[one][1] - step[1])
    else:
        x, y = cells.setdefault(other, (0, 0))
        cells[one] = (x + step[0], y + step[1])


def answer(facts: list[str], question: str) -> str | None:
    """Answer a question from the facts; None if they do not tell."""
    read = read_facts(facts)
    if found := re.fullmatch(r"Where is ([A-Z]\w+)\?", question):
        return read.person_room.get(found[1])
    if found := re.fullmatch(r"Where is the (\w+)\?", question):
        return rooms[-1] if (rooms := read.thing_rooms[found[1]]) else None
    if found := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
        rooms = read.thing_rooms[found[1]]
        places = [place for place, room in enumerate(rooms) if room == found[2]]
        return rooms[places[0] - 1] if len(places) == 1 and places[0] > 0 else None
    if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        return _room_at(read.cells, found[2], STEPS[found[1]], 1)
    if found := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
        return _room_at(read.cells, found[1], STEPS[found[2]], -1)
    for form, asked in (
        (r"What did (?P<giver>\w+) give to (?P<receiver>\w+)\?", 1),
        (r"Who gave the (?P<thing>\w+)(?: to (?P<receiver>\w+))?\?", 0),
        (r"Who did (?P<giver>\w+) give the (?P<thing>\w+) to\?", 2),
        (r"Who received the (?P<thing>\w+)\?", 2),
    ):
        if found := re.fullmatch(form, question):
            known = [found.groupdict().get(name) for name in ("giver", "thing", "receiver")]
            fits = [gift for gift in read.gifts if all(k in (None, g) for k, g in zip(known, gift, strict=True))]
            return fits[-1][asked] if fits else None
    raise AssertionError(f"{question!r} is no question")


def _room_at(cells: dict[str, tuple[int, int]], room: str, step: tuple[int, int], sign: int) -> str | None:
    x, y = cells[room]
    wanted = (x + sign * step[0], y + sign * step[1])
    return next((other for other, cell in cells.items() if cell == wanted), None)


def facts_in(text: str) -> list[str]:
    """Return the facts among other sentences, in order."""
    patterns = (MOVE, TAKE, DROP, GIVE, BESIDE)
    sentences = re.split(r"(?<=[.?])\s+", text)
    return [sentence for sentence in sentences if any(pattern.fullmatch(sentence) for pattern in patterns)]

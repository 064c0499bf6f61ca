"""Write a corpus in the published layout of CMU-DoG whose text is ours: films that do not exist, and talk about them.

python docs/images/film_dialogues.py FOLDER
dist-mem data build cmu_dog --source FOLDER --out data/films --vocab-size 640

Every answer is a fact of the film's description, which a model can only know by remembering the description. The films
of validation and test are not in train. The licence of CMU-DoG does not allow its text in a picture; this text is free.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

SIZES = {"train": 400, "valid": 12, "test": 12}  # films of a folder
TALKS = {"train": 2, "valid": 1, "test": 1}  # conversations about each
QUESTIONS = {
    "Who made the film?": "It is by {director}.",
    "Who is it about?": "It is about {hero}.",
    "Where does it begin?": "It begins in a {home}.",
    "What is lost in it?": "A {thing} is lost.",
    "Who stole it?": "The thief is {thief}.",
    "Where is it hidden?": "It is hidden in a {hiding}.",
    "How do they get there?": "They go there by {vehicle}.",
    "Who keeps it in the end?": "In the end {friend} keeps it.",
}


def _names(words: str) -> list[str]:
    return words.split()


FIRST = _names(
    "Ada Ben Clara Dora Emil Flora Gus Hilda Ivan Julia Kurt Lena Max Nora Otto Paula Rosa Simon Tilda Viktor"
)
LAST = _names("Abel Brandt Cole Dorn Ellis Frey Gray Holt Irving Jonas Kern Lund Marsh Noble Orlov Page Quist Reed")
PLACES = _names("harbour mill monastery circus lighthouse mine theatre vineyard prison castle cellar swamp")
THINGS = _names("violin crown letter diamond map parrot clock painting sword ring telescope mask")
VEHICLES = _names("boat train balloon sledge bicycle camel tram raft wagon aeroplane")
WORDS = _names("Silver Quiet Broken Golden Frozen Hollow Crimson Secret Distant Burning")
GENRES = _names("Comedy Thriller Drama Western Romance Mystery")


def film(draw: Random, number: int) -> tuple[dict[str, object], dict[str, str]]:
    """Return the description of a film in the published layout, and the facts that its answers name."""
    hero, thief, friend = draw.sample(FIRST, 3)
    home, hiding = draw.sample(PLACES, 2)
    thing, vehicle = draw.choice(THINGS), draw.choice(VEHICLES)
    director, name = f"{draw.choice(FIRST)} {draw.choice(LAST)}", f"The {draw.choice(WORDS)} {thing.title()}"
    facts = {
        "movieName": name,
        "year": str(draw.randint(1950, 1999)),
        "genre": draw.choice(GENRES),
        "director": director,
        "cast": [f"{draw.choice(FIRST)} {last}" for last in draw.sample(LAST, 3)],
        "rating": [f"{draw.randint(40, 99)}%", draw.choice("ABC")],
        "introduction": f"{name} is a film about {hero}, who has lost a {thing}.",
        "critical_response": ["A film to see twice.", " Too long, but well played."],
    }
    scenes = {
        "0": facts,
        "1": f"{hero} lives in a {home} and guards a {thing}. One night the {thing} is gone, and {thief} stole it.",
        "2": f"{thief} has hidden the {thing} in a {hiding}. {hero} and {friend} must go there by {vehicle}.",
        "3": f"They find the {thing} and {thief} runs away. In the end {friend} keeps the {thing}.",
        "wikiDocumentIdx": number,
    }
    named = {"hero": hero, "thief": thief, "friend": friend, "home": home, "hiding": hiding, "thing": thing}
    return scenes, named | {"vehicle": vehicle, "director": director}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_corpus(source: Path) -> None:
    """Write the films, and for every film conversations that ask for its facts in random order."""
    draw, number = Random(0), 0
    for folder, size in SIZES.items():
        for _ in range(size):
            scenes, facts = film(draw, number)
            write_json(source / "WikiData" / f"film{number}.json", scenes)
            for talk in range(TALKS[folder]):
                messages = []
                for question in draw.sample(list(QUESTIONS), len(QUESTIONS)):
                    messages += [("user1", question), ("user2", QUESTIONS[question].format(**facts))]
                history = [{"docIdx": 0, "text": text, "uid": uid, "utcTimestamp": "2026"} for uid, text in messages]
                body = {"history": history, "wikiDocumentIdx": number, "rating": 1, "whoSawDoc": ["user2"]}
                write_json(source / "Conversations" / folder / f"{number:04}-{talk}.json", body)
            number += 1


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))

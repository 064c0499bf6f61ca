"""Write folders in the published layout of CMU-DoG: films, and conversations about them."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_conversation(source: Path, folder: str, name: str, messages: list[tuple[str, str]]) -> None:
    history = [{"docIdx": 0, "text": text, "uid": uid, "utcTimestamp": "2018"} for uid, text in messages]
    body = {"history": history, "wikiDocumentIdx": 2, "rating": 1, "whoSawDoc": ["user1", "user2"]}
    write_json(source / "Conversations" / folder / f"{name}.json", body)


def write_film(source: Path) -> None:
    """Write the film that all conversations are about."""
    facts = {
        "movieName": "Jaws",
        "year": "1975",
        "genre": "Thriller",
        "director": "Steven Spielberg",
        "cast": ["Roy Scheider", "Robert Shaw"],
        "rating": ["97%", "A"],
        "introduction": "A shark.",
        "critical_response": ["Fine.", " A classic."],
    }
    film = {"0": facts, "1": "It bites. ", "2": "They hunt it.", "3": "It ends.", "wikiDocumentIdx": 2}
    write_json(source / "WikiData" / "Jaws.json", film)

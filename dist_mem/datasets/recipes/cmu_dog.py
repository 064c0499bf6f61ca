"""Build CMU-DoG (Zhou et al. 2018): conversations about a film; the replies are scored.

    git clone https://github.com/festvox/datasets-CMU_DoG
    dist-mem data build cmu_dog --source datasets-CMU_DoG --out data/cmu_dog
    dist-mem data build cmu_dog --source datasets-CMU_DoG --out data/released --splits released
    dist-mem data build cmu_dog --source datasets-CMU_DoG --out data/cmu_dog_bare --no-document

A document is one conversation: the Wikipedia text about the film, an empty line, then the turns,
one per line, as "A: text" (user1) and "B: text" (user2). The scored part of a turn, of both users,
is from the space after its tag to the end of its line. docs/howto/dialogue.md explains these
choices.

Some conversations of validation and test are in the released train split too. By default these
copies are removed from train; validation and test are always complete. The titles of the leaked
conversations end in a mark, by which `dist-mem dialogue` reports them separately. The tokenizer is
the same for all of these builds: it is trained on every film once, and on the turns of train
without the copies. The data have no licence file: ask before redistributing them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.data.tokenizers.sentencepiece import train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.options import add_build_options, add_tokenizer_options, check_paths, positive, vocab_size_of
from dist_mem.datasets.source import SourceDocument
from dist_mem.datasets.tree import listed_files
from dist_mem.errors import UnusableError
from dist_mem.runtime.file_schema import read_json

LEAKED = " (also in the released train split)"  # suffix of the titles of such conversations
FOLDERS = {"train": "train", "validation": "valid", "test": "test"}  # split -> its folder in Conversations
TAGS = {"user1": "A:", "user2": "B:"}
PUBLISHED = 4_112  # conversations, Zhou et al. 2018 and the README of the data
FACTS = {  # of section 0, in the order in which they are written
    "movieName": "Title",
    "year": "Year",
    "genre": "Genre",
    "director": "Director",
    "cast": "Cast",
    "rating": "Ratings",
    "introduction": "Introduction",
    "critical_response": "Reviews",
}
SCENES = ("1", "2", "3")  # the other sections


class Turn(NamedTuple):
    """Successive messages of one user, until the other user writes."""

    user: str  # user1 | user2
    text: str  # one line, with no space around it


class FilmConversation(NamedTuple):
    id: str  # its file name, the same for all copies of it
    film: int  # wikiDocumentIdx
    turns: list[Turn]


class Film(NamedTuple):
    name: str
    text: str  # lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_build_options(parser)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="clone of the data: has the folders Conversations and WikiData")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", default="cmu_dog", help="of the dataset, part of the tars' names (default: %(default)s)")
    add(
        "--splits",
        choices=("deduplicated", "released"),
        default="deduplicated",
        help="train without the conversations of validation and test, or as it was released (default: %(default)s)",
    )
    add(
        "--document",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put what Wikipedia has about the film before the conversation (default: yes)",
    )
    add("--limit", type=positive, metavar="N", help="only the first N conversations of every split")
    add_tokenizer_options(parser, "sentencepiece", "bytes", vocab_size=8_000)


def build(options: argparse.Namespace) -> None:
    """Read the data, print the number of conversations, and build."""
    check_paths(options.source)
    vocab_size_of(options)  # refuses one that is not used
    tokenizer = options.tokenizer_from and find_tokenizer(options.tokenizer_from)
    films = read_films(options.source / "WikiData")
    released = {
        split: read_conversations(options.source / "Conversations" / folder, films) for split, folder in FOLDERS.items()
    }
    train_ids = {conversation.id for conversation in released["train"]}
    leaked = train_ids & {conversation.id for split in ("validation", "test") for conversation in released[split]}
    alone = [conversation for conversation in released["train"] if conversation.id not in leaked]
    built = released if options.splits == "released" else {**released, "train": alone}
    print(counts_table(released, built))
    documents = {
        split: [
            source_document(
                conversation,
                films[conversation.film],
                with_document=options.document,
                is_leaked=split != "train" and conversation.id in leaked,
            )
            for conversation in conversations[: options.limit]
        ]
        for split, conversations in built.items()
    }
    build_dataset(
        documents,
        options.out,
        name=options.name,
        tokenizer=tokenizer or make_tokenizer(options, films.values(), alone),
        workers=options.workers,
        overwrite=options.overwrite,
    )


def make_tokenizer(
    options: argparse.Namespace, films: Iterable[Film], conversations: Iterable[FilmConversation]
) -> Tokenizer:
    """Make or train the chosen tokenizer; each film counts once in its training, however many conversations it has."""
    if options.tokenizer == BytesTokenizer.kind:
        return BytesTokenizer()
    print(f"tokenizer: training a SentencePiece model of {vocab_size_of(options):,} pieces", flush=True)
    of_films = [line for film in films for line in film.text.splitlines()]
    of_turns = [f"{TAGS[turn.user]} {turn.text}" for conversation in conversations for turn in conversation.turns]
    return train_pieces(of_films + of_turns, vocab_size=vocab_size_of(options))


def source_document(
    conversation: FilmConversation, film: Film, *, with_document: bool, is_leaked: bool
) -> SourceDocument:
    """Return a conversation as a document, with the spans of the replies as its scored parts."""
    text = f"{film.text}\n" if with_document else ""
    spans = []
    for turn in conversation.turns:
        text += TAGS[turn.user]
        start = len(text)  # at the space: the first token of a reply holds it
        text += f" {turn.text}\n"
        spans.append((start, len(text)))
    title = film.name + (LEAKED if is_leaked else "")
    return SourceDocument(conversation.id, title, text, scored=spans)


def read_films(folder: Path) -> dict[int, Film]:
    """Return the films by wikiDocumentIdx."""
    return dict(film_of(facts, path) for path, facts in read_folder(folder))


def film_of(facts: dict[str, Any], path: Path) -> tuple[int, Film]:
    """Return wikiDocumentIdx and a film whose text has one line for each fact of section 0 and each scene."""
    try:
        index = film_index(facts)
        lines = [f"{label}: {on_one_line(facts['0'][key])}" for key, label in FACTS.items()]
        lines += [f"Scene {scene}: {on_one_line(facts[scene])}" for scene in SCENES]
        name = on_one_line(facts["0"]["movieName"])
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: it is no wiki document of CMU-DoG") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no wiki document of CMU-DoG: {error}") from error
    return index, Film(name, "".join(f"{line}\n" for line in lines))


def film_index(facts: dict[str, Any]) -> int:
    """Return wikiDocumentIdx.

    Raises:
        KeyError: there is none.  TypeError: it is no whole number.
    """
    if not isinstance(index := facts["wikiDocumentIdx"], int):
        raise TypeError(f"wikiDocumentIdx is {index!r}, no whole number")
    return index


def read_conversations(folder: Path, films: dict[int, Film]) -> list[FilmConversation]:
    """Read the conversations of a folder, in the order of their names."""
    conversations = []
    for path, facts in read_folder(folder):
        try:
            film, history = film_index(facts), facts["history"]
            turns = turns_of([(message["uid"], message["text"]) for message in history])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no conversation of CMU-DoG ({error!r})") from error
        if film not in films:
            raise ValueError(f"{path} is about wikiDocumentIdx {film}, which no file in WikiData has")
        conversations.append(FilmConversation(path.stem, film, turns))
    return conversations


def turns_of(messages: Iterable[tuple[str, str]]) -> list[Turn]:
    """Join successive messages of one user by spaces; omit empty ones.

    Raises:
        KeyError: a user is neither user1 nor user2.
    """
    lines = [(user, line) for user, text in messages if (line := on_one_line(text))]
    turns = [Turn(user, " ".join(line for _, line in said)) for user, said in groupby(lines, key=lambda said: said[0])]
    for turn in turns:
        TAGS[turn.user]
    return turns


def on_one_line(text: str | Sequence[str]) -> str:
    """Remove line ends and outer spaces; join a list by semicolons."""
    if not isinstance(text, str):
        return "; ".join(on_one_line(part) for part in text)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def read_folder(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read the JSON files of a folder, sorted by name; return paths and contents."""
    paths = listed_files(folder, ".json").values()
    return [(path, read_json(path, UnusableError, ": fetch it again")) for path in paths]


def counts_table(released: dict[str, list[FilmConversation]], built: dict[str, list[FilmConversation]]) -> str:
    """Return a table of the conversations per split, released and built, and of the distinct and published numbers."""
    ids = {split: {conversation.id for conversation in released[split]} for split in released}
    lines = [f"{'conversations':<14} {'released':>8} {'in train':>8} {'built':>8}"]
    for split in released:
        in_train = "" if split == "train" else str(len(ids[split] & ids["train"]))
        lines.append(f"{split:<14} {len(released[split]):>8} {in_train:>8} {len(built[split]):>8}")
    distinct = set().union(*ids.values())
    total = sum(map(len, released.values()))
    lines.append(f"{total:,} files, {len(distinct):,} distinct conversations; published: {PUBLISHED:,}")
    return "\n".join(lines)

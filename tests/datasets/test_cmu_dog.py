"""CMU-DoG as shards: what a document looks like, what is scored, which conversations are leaked."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.shard import read_index
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets.recipes import cmu_dog
from dist_mem.papers.dialogue.replies import LEAKED, find_replies, is_leaked
from tests.support.cmu_dog_source import write_conversation, write_film, write_json
from tests.support.data_builders import build_data, build_refused, documents_of

MESSAGES = [
    ("user2", "Hi there!"),
    ("user2", " Did you see it?\n"),
    ("user1", "No.\nIs it\r\n good?"),
    ("user1", "   "),
    ("user2", ""),
    ("user1", "Tell me"),
    ("user2", "Yes:  A: B:"),
]
FILM = """Title: Jaws
Year: 1975
Genre: Thriller
Director: Steven Spielberg
Cast: Roy Scheider; Robert Shaw
Ratings: 97%; A
Introduction: A shark.
Reviews: Fine.; A classic.
Scene 1: It bites.
Scene 2: They hunt it.
Scene 3: It ends.
"""
DIALOGUE = """B: Hi there! Did you see it?
A: No. Is it good? Tell me
B: Yes:  A: B:
"""
SPOKEN = [" Hi there! Did you see it?\n", " No. Is it good? Tell me\n", " Yes:  A: B:\n"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One film; six conversations, of which `leak` is in train and test, `dev` in train and validation."""
    source = tmp_path / "source"
    write_film(source)
    write_conversation(source, "train", "first", MESSAGES)
    for folder, name in [("train", "dev"), ("valid", "dev"), ("train", "leak"), ("test", "leak"), ("test", "other")]:
        write_conversation(source, folder, name, [("user1", f"zzzz {name} zzzz"), ("user2", "qqqq")])
    return source


def build(source: Path, out: Path, *options: str) -> int:
    return build_data("cmu_dog", "--source", str(source), "--out", str(out), "--tokenizer", "bytes", *options)


def ids(out: Path, split: str) -> list[str]:
    return [entry.id for entry in read_index(out / split).documents]


def spoken(out: Path) -> list[str]:
    """Each reply of the first document."""
    first, tokenizer = documents_of(out)[0], load_tokenizer(out)
    return [tokenizer.decode(first.tokens[reply.start : reply.stop]) for reply in find_replies(first.mask)]


@pytest.mark.parametrize(("option", "text"), [("--document", f"{FILM}\n{DIALOGUE}"), ("--no-document", DIALOGUE)])
def test_a_document_is_the_film_and_then_the_turns_of_which_what_is_said_is_scored(
    source: Path, tmp_path: Path, option: str, text: str
) -> None:
    """Up to the end of the line, by both users."""
    assert build(source, tmp_path, option) == 0
    assert documents_of(tmp_path)[0].text == text
    assert spoken(tmp_path) == SPOKEN
    assert not verify_dataset(tmp_path)


def test_pieces_are_scored_from_the_space_on(source: Path, tmp_path: Path) -> None:
    arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--vocab-size", "330"]
    assert build_data("cmu_dog", *arguments) == 0
    assert load_tokenizer(tmp_path / "out").kind == "sentencepiece"
    assert spoken(tmp_path / "out") == SPOKEN


@pytest.mark.parametrize(("splits", "train"), [("deduplicated", ["first"]), ("released", ["dev", "first", "leak"])])
def test_copies_of_held_out_conversations_are_removed_from_train_only_and_marked_either_way(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], splits: str, train: list[str]
) -> None:
    assert build(source, tmp_path / "out", "--splits", splits) == 0
    reported = capsys.readouterr().out
    found = {split: ids(tmp_path / "out", split) for split in ("train", "validation", "test")}
    assert found == {"train": train, "validation": ["dev"], "test": ["leak", "other"]}
    titles = [entry.title for entry in read_index(tmp_path / "out" / "test").documents]
    assert titles == [f"Jaws{LEAKED}", "Jaws"]
    assert [is_leaked(title) for title in titles] == [True, False]
    assert {entry.title for entry in read_index(tmp_path / "out" / "train").documents} == {"Jaws"}
    if splits == "released":
        assert "6 files, 4 distinct conversations; published: 4,112" in reported
        rows = [line.split() for line in reported.splitlines()[1:4]]
        assert rows == [["train", "3", "3"], ["validation", "1", "1", "1"], ["test", "2", "1", "2"]]


def test_all_builds_have_one_tokenizer_which_has_not_seen_leaked_turns(source: Path, tmp_path: Path) -> None:
    builds: list[list[str]] = [[], ["--splits", "released"], ["--no-document"]]
    for number, options in enumerate(builds):
        arguments = ["--source", str(source), "--out", str(tmp_path / str(number)), "--vocab-size", "330", *options]
        assert build_data("cmu_dog", *arguments) == 0
    tokenizers = [load_tokenizer(tmp_path / str(number)) for number in range(3)]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == 1
    assert not [piece for piece in tokenizers[0].pieces if b"zz" in piece]


def test_the_first_conversations_of_every_split_may_be_taken(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "out", "--limit", "1") == 0
    assert ids(tmp_path / "out", "test") == ["leak"]


def empty_conversations(source: Path) -> None:
    shutil.rmtree(source)
    source.mkdir()


OTHER_FILM = {"history": [], "wikiDocumentIdx": 7}
TWO_FILMS = {"history": [], "wikiDocumentIdx": [0, 1]}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "Jaws.json": lambda source: write_json(source / "WikiData" / "Jaws.json", {"0": {}, "wikiDocumentIdx": 2}),
    "nameless.json": lambda source: write_json(source / "WikiData" / "nameless.json", {}),
    "list.json": lambda source: write_json(source / "WikiData" / "list.json", []),
    "text.json": lambda source: write_json(source / "WikiData" / "text.json", {"wikiDocumentIdx": 8, "0": "text"}),
    "other.json": lambda source: (source / "Conversations" / "test" / "other.json").write_text("{"),
    "deep.json": lambda source: (source / "WikiData" / "deep.json").write_text("[" * 10**5),
    "user3": lambda source: write_conversation(source, "valid", "dev", [("user3", "Hello")]),
    "wikiDocumentIdx 7": lambda source: write_json(source / "Conversations" / "valid" / "dev.json", OTHER_FILM),
    "two.json": lambda source: write_json(source / "Conversations" / "valid" / "two.json", TWO_FILMS),
    "--source": empty_conversations,
}


@pytest.mark.parametrize("named", DAMAGES)
def test_unusable_files_are_named(source: Path, tmp_path: Path, named: str) -> None:
    DAMAGES[named](source)
    build_refused("cmu_dog", "--source", source, "--out", tmp_path / "out", named=(named,))


@pytest.fixture
def real_source(shared_data: Path) -> Path:
    source = shared_data / "data" / "cmu_dog"
    if not source.is_dir():
        pytest.skip(f"no CMU-DoG at {source}: clone github.com/festvox/datasets-CMU_DoG there")
    return source


def test_the_real_data_are_counted_as_known(real_source: Path) -> None:
    films = cmu_dog.read_films(real_source / "WikiData")
    found = {
        split: {conversation.id: conversation for conversation in cmu_dog.read_conversations(folder, films)}
        for split, name in cmu_dog.FOLDERS.items()
        for folder in [real_source / "Conversations" / name]
    }
    assert len(films) == 30
    train, validation, test = found["train"], found["validation"], found["test"]
    assert (len(train), len(validation), len(test)) == (3_373, 229, 619)
    assert (len(train.keys() & validation), len(train.keys() & test), len(validation.keys() & test)) == (45, 63, 2)
    together = {**train, **validation, **test}
    assert len(together) == 4_111
    # one name means one conversation, and two names mean two
    assert all(together[name] == conversation for split in found.values() for name, conversation in split.items())
    turns = [tuple(conversation.turns) for conversation in together.values()]
    assert len(set(turns)) == 4_111
    # the published mean of 21.43 turns counts how often the speaker changes, so successive messages are one turn
    assert np.mean([len(conversation) - 1 for conversation in turns]) == pytest.approx(21.43, abs=0.01)

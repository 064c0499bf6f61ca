"""Parts of one build: one command at a time writes them, and no reader takes those of two builds together."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import DataConfig
from dist_mem.data import shard
from dist_mem.data.build_record import read_build
from dist_mem.data.directory import local_dir, open_index, refresh
from dist_mem.data.metadata import ShardError
from dist_mem.data.remote.fetch import WrongRemoteError
from dist_mem.data.tokenizers.registry import find_tokenizer, load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import builder, task_text
from dist_mem.datasets.recipes import builder_names, characters
from dist_mem.runtime.locks import hold_folder
from tests.support.cmu_dog_source import write_conversation, write_film
from tests.support.data_builders import BUILDERS, SMALL, build_data, build_refused
from tests.support.file_server import FileServer, be_impatient
from tests.support.messages import refused, said_line
from tests.support.published_tokenizers import save_published
from tests.support.small_builds import contents

Arguments = tuple[str | Path, ...]
TURNS = [("user1", "Hi."), ("user2", "The shark bites.")]


def write_books(folder: Path, text: str = "A river, and a lamp in the water.\n") -> Path:
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / f"{split}.txt").write_text(f"{split}: {text * 9}", encoding="utf-8")
    return folder


def write_dialogues(folder: Path) -> Path:
    write_film(folder)
    for split in ("train", "valid", "test"):
        write_conversation(folder, split, f"{split}1", [(user, f"{text} {split}") for user, text in TURNS])
    return folder


def write_wiki(folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(" = Title = \n \n A text . \n" * (1 + len(split)))
    return folder


def write_enwik(path: Path) -> Path:
    path.write_bytes(b"<page>A line.</page>\n" * 50)
    return path


SOURCES: dict[str, Callable[[Path], Arguments]] = {
    "text": lambda source: ("--source", write_books(source), "--tokenizer", "bytes"),
    "pg19": lambda source: ("--source", write_books(source), "--tokenizer", "bytes"),
    "wikitext": lambda source: ("--source", write_wiki(source)),
    "characters": lambda source: ("--source", write_enwik(source)),
    "cmu_dog": lambda source: ("--source", write_dialogues(source), "--tokenizer", "bytes"),
    "sample": lambda source: ("--size", "tiny"),
    **{name: lambda source, options=options: (*SMALL, *options) for name, options in BUILDERS.items()},  # type: ignore[misc]
}


@pytest.fixture(autouse=True)
def small_enwik(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(characters, "NUM_BYTES", 21 * 50)
    monkeypatch.setattr(characters, "HELD_OUT", 100)


@pytest.mark.parametrize("name", builder_names())
def test_a_second_build_into_a_folder_is_refused_while_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out"
    arguments = (*SOURCES[name](tmp_path / "source"), "--out", out)
    second = list[str]()

    def write_split(documents: Any, split_dir: Path, **options: Any) -> shard.Index:
        if not second:
            second.append("begun")
            for more in ((), ("--overwrite",)):
                build_refused(name, *arguments, *more, named=(f"--out {out}", f"process {os.getpid()} on "))
        return shard.write_split(documents, split_dir, **options)

    for module in (builder, task_text):
        monkeypatch.setattr(module, "write_split", write_split)
    assert build_data(name, *arguments) == 0
    assert second
    assert not list(out.rglob(".*"))
    files = contents(out)
    assert {path.split("/")[-1] for path in files} > {"index.json", "build.json"}
    assert build_data(name, *arguments) == 0
    assert contents(out) == files
    for data_dir in {path.parent.parent for path in out.rglob("index.json")}:
        assert verify_dataset(data_dir) == []


def test_a_build_into_a_folder_that_is_written_does_not_read_its_source(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "out", "the test"):
        (tmp_path / "x.jsonl").write_text("no JSON")
        arguments = ("--source", tmp_path / "x.jsonl", "--out", tmp_path / "out")
        build_refused("text", *arguments, named=(f"--out {tmp_path / 'out'}", f"process {os.getpid()} on "))
    build_refused("text", *arguments, named=("x.jsonl",))


# Splits of two builds.


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two corpora, built by one command each."""
    for name, text in (("one", "Of a river.\n"), ("two", "Of another lamp.\n")):
        source = write_books(tmp_path / f"{name}-texts", text)
        assert build_data("text", "--source", source, "--out", tmp_path / name, "--tokenizer", "bytes") == 0
    yield tmp_path / "one", tmp_path / "two"


def exchange(split: str, one: Path, two: Path) -> None:
    shutil.rmtree(one / split)
    shutil.copytree(two / split, one / split)


def copy_but_record(one: Path, two: Path) -> None:
    for path in (two / "train").iterdir():
        if path.name != "build.json":
            shutil.copy(path, one / "train")


MIXTURES: dict[str, Callable[[Path, Path], object]] = {
    "another train": partial(exchange, "train"),
    "another test": partial(exchange, "test"),
    "another split more": lambda one, two: shutil.copytree(two / "test", one / "held-out"),
    "an old split": lambda one, two: (one / "test" / "build.json").unlink(),
    "files of another split": copy_but_record,
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_splits_of_two_builds_are_found_by_verify_and_by_every_reader(
    two: tuple[Path, Path], capsys: pytest.CaptureFixture[str], mixture: str
) -> None:
    one, other = two
    MIXTURES[mixture](one, other)
    assert main(["data", "verify", str(one)]) == 1
    said_line(capsys.readouterr().err, "build.json")
    with refused(ShardError, "build.json"):
        open_index(DataConfig(path=str(one)), "train")


def test_single_splits_of_a_build_and_whole_folders_without_a_record_are_read(
    two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = two
    shutil.rmtree(one / "test")
    for path in other.glob("*/build.json"):
        path.unlink()  # as builds before there was a record
    for folder in two:
        open_index(DataConfig(path=str(folder)), "train")
        assert main(["data", "verify", str(folder)]) == 0
    said_line(capsys.readouterr().out, "two: ", "build.json", "train, validation")


@pytest.mark.servers
def test_splits_of_two_builds_on_a_server_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = two
    server = FileServer(one)
    data = DataConfig(path=server.url, cache=str(tmp_path / "cache"))
    refresh(data, ["train", "test"])
    (one / "test" / "build.json").unlink()
    with refused(WrongRemoteError, "build.json"):
        refresh(data, ["train", "test"])
    (one / "train" / "build.json").unlink()
    refresh(data, ["train", "test"])
    MIXTURES["another train"](one, other)
    shutil.copy(other / "test" / "build.json", one / "test")
    refresh(data, ["train", "test"])
    with refused(ShardError, "build.json"):
        open_index(data, "test")
    server.close()


@pytest.mark.servers
@pytest.mark.parametrize(
    "name", ["train/index.json", "train/documents.safetensors", "test/index.json", "test/build.json"]
)
def test_a_start_that_fails_in_the_middle_of_another_build_uses_the_one_before(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    be_impatient(monkeypatch)
    one, other = two
    with closing(FileServer(one)) as server:
        data, splits = DataConfig(path=server.url, cache=str(tmp_path / "cache")), ["train", "test"]
        refresh(data, splits)
        before = contents(local_dir(data) / "train"), contents(local_dir(data) / "test")
        server.root, server.faults[name] = other, [503]
        refresh(data, splits)
        assert (contents(local_dir(data) / "train"), contents(local_dir(data) / "test")) == before
        server.faults.clear()
        refresh(data, splits)
        for split in splits:
            assert read_build(local_dir(data) / split) == read_build(other / split)
            open_index(data, split)


# A text is corrected, and keeps its size; or the settings of a tokenizer, whose ids stay.


@pytest.mark.parametrize("name", ["pg19", "passkey"])
def test_corrected_settings_of_a_tokenizer_come_into_the_same_build_and_no_other(tmp_path: Path, name: str) -> None:
    save_published("llama3", tmp_path / "published")
    arguments: Arguments = ("--source", write_books(tmp_path / "books"))
    if name != "pg19":
        arguments = ("--books", tmp_path / "books", *SMALL, "--lengths", "900")
    arguments = (*arguments, "--out", tmp_path / "out", "--tokenizer-from", tmp_path / "published")
    assert build_data(name, *arguments) == 0
    before = contents(tmp_path / "out")
    (tmp_path / "published" / "chat_template.jinja").write_text("{{ corrected }}")
    build_refused(name, *arguments, *(("--name", "b") if name == "pg19" else ("--seed", "1")), named=("index.json",))
    assert contents(tmp_path / "out") == before
    assert build_data(name, *arguments) == 0
    changed = {path for path, content in contents(tmp_path / "out").items() if content != before[path]}
    assert {path.split("/")[-1] for path in changed} == {"tokenizer.huggingface.json"}
    data_dir = next((tmp_path / "out").rglob("tokenizer.json")).parent
    assert load_tokenizer(data_dir).content() == find_tokenizer(tmp_path / "published").content()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("name", ["pg19", "passkey", "babilong"])
def test_a_corrected_book_of_the_same_size_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_stopped: bool
) -> None:
    source = write_books(tmp_path / "books")
    arguments: Arguments = ("--source", source, "--tokenizer", "bytes")
    if name != "pg19":
        arguments = ("--books", source, *SMALL, *BUILDERS[name])
    arguments = (*arguments, "--out", tmp_path / "out")
    if is_stopped:  # while it reads a book
        with monkeypatch.context() as patch:
            patch.setattr(task_text, "sha256_of", interrupt)
            patch.setattr(builder, "encode_piece", interrupt)
            assert build_data(name, *arguments) == 130
    assert build_data(name, *arguments) == build_data(name, *arguments) == 0
    book = source / "train" / "train.txt"
    book.write_text(book.read_text().replace("lamp", "Lamp"))
    build_refused(name, *arguments, named=("train", "--overwrite"))
    files = contents(tmp_path / "out")
    assert build_data(name, *arguments, "--overwrite") == build_data(name, *arguments) == 0
    assert contents(tmp_path / "out") != files


@pytest.mark.parametrize("name", ["pg19", "passkey"])
def test_a_build_is_there_until_another_is_whole_which_goes_on_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, out = write_books(tmp_path / "books"), tmp_path / "out"
    book = source / "train" / "train.txt"
    arguments: Arguments = ("--source", source, "--vocab-size", "300")
    if name != "pg19":
        arguments = ("--books", source, *SMALL, *BUILDERS[name])

    def read() -> dict[str, bytes]:
        return {path: content for path, content in contents(out).items() if ".build" not in path}

    def overwrite(stop_at: str | None) -> int:
        def write_split(documents: Any, split_dir: Path, **options: Any) -> shard.Index:
            if split_dir.name == stop_at:
                interrupt()
            written.append(split_dir.name)
            return shard.write_split(documents, split_dir, **options)

        with monkeypatch.context() as patch:
            for module in (builder, task_text):
                patch.setattr(module, "write_split", write_split)
            return build_data(name, *arguments, "--out", out, "--overwrite")

    assert build_data(name, *arguments, "--out", out) == 0
    before = read()
    for word in ("lamp", "river"):  # two other builds, of which the second is what is there at the end
        book.write_text(book.read_text().replace(word, word.title()))
        written = list[str]()
        assert overwrite(stop_at="test") == 130
        assert read() == before
    assert overwrite(stop_at=None) == 0
    assert written.count("train") == written.count("test") == 1
    assert build_data(name, *arguments, "--out", tmp_path / "straight") == 0
    assert contents(out) == contents(tmp_path / "straight")

"""Files under --source: what is read, passed over, counted or refused, in every builder."""

import gzip
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_mem.datasets import gpt2_tokenizer
from dist_mem.datasets.recipes import cmu_dog, pg19
from dist_mem.datasets.task_text import Books
from dist_mem.errors import UnusableError
from tests.support.data_builders import TRAIN, build_refused, texts_of
from tests.support.messages import refused, said

HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation", "heldout"}
READ = (".txt", ".jsonl", ".ndjson", ".json.gz")
HIDDEN = ("._b1.txt", ".ipynb_checkpoints/b1.txt", ".Trash-1000/files/b.txt", "__MACOSX/._b1.txt", "__MACOSX/b1.txt")
FOLDERS = ["data", "en", "train", "Train", "TEST", "valid", "dev-clean", "held_out", "contest", ".git", "__MACOSX"]
STEMS = ["b1", "b2", "train", "train-00000-of-00001", "test-00000-of-00002", "wiki.valid.raw", "acid_test", "._b1"]
SUFFIXES = [".txt", ".TXT", ".jsonl", ".NDJSON", ".json.gz", ".md", ".txt.utf-8", ".json", ""]
FIX = re.compile("rename|put it|larger fraction|no file of|must be unique|cut the text")
PATHS = st.tuples(st.lists(st.sampled_from(FOLDERS), max_size=2), st.sampled_from(STEMS), st.sampled_from(SUFFIXES))


def write(folder: Path, name: str) -> None:
    """Write a file whose one document is its name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lower = name.lower()
    row = json.dumps({"text": name}).encode() + b"\n"
    content = gzip.compress(row) if lower.endswith(".gz") else row if lower.endswith(READ[1:]) else name.encode()
    path.write_bytes(content)


def read(source: Path, *options: str) -> tuple[dict[str, str], str]:
    """The split of each document, by its text, and what is printed."""
    with redirect_stdout(io.StringIO()) as printed:
        splits = texts_of("--source", source, *options)
    return {each.text(): split for split, found in splits.items() for each in found}, printed.getvalue()


def is_put_there_by_a_system(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


@given(st.lists(PATHS, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_every_file_is_read_or_counted_and_none_that_its_path_holds_out_is_in_train(
    paths: list[tuple[list[str], str, str]],
) -> None:
    names = {"/".join([*folders, stem + suffix]) for folders, stem, suffix in paths}
    assume(not any(name.startswith(f"{other}/") for name in names for other in names))  # no file is a folder too
    taken = {name for name in names if name.lower().endswith(READ) and not is_put_there_by_a_system(name)}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            write(Path(folder), name)
        try:
            splits, printed = read(Path(folder))
        except UnusableError as error:
            assert FIX.search(str(error)), error
            return
    assert splits.keys() == taken
    for name in taken:
        *parts, file = name.lower().replace("held_out", "heldout").split("/")
        if "train" in parts and file.endswith(".txt"):
            continue  # a word in the title of a text that stands in a folder train
        words = set(re.split("[^a-z]", "/".join([*parts, file])))
        assert splits[name] != "train" or not words & HELD_OUT, name
    others = [name for name in names - taken if not is_put_there_by_a_system(name)]
    counts = [int(number) for number in re.findall(r"(?:over|,) (\d+) (?:\.|without)", printed)]
    assert sum(counts) == len(others)
    assert ("hidden (" in printed) == any(map(is_put_there_by_a_system, names))


def test_files_that_nobody_put_there_are_passed_over_and_counted_in_every_builder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b1.txt", "b2.TXT", *HIDDEN):
        write(tmp_path / "train", name)
        (tmp_path / "json" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "json" / re.sub("(?i)txt$", "json", name)).write_text("{}")
    found = {
        "text": set(read(tmp_path / "train", "--split-by-hash", "train=1")[0]),
        "pg19": {each.text() for each in pg19.read_split(tmp_path / "train", {}, order="id", limit=None)},
        "gpt2_tokenizer": set(gpt2_tokenizer.texts(tmp_path / "train")),
        "books": {path.name for path in Books(tmp_path / "train", ("train",)).paths["train"]},
        "cmu_dog": {path.name.replace(".json", ".txt") for path, _ in cmu_dog.read_folder(tmp_path / "json")},
    }
    for builder, texts in found.items():
        assert {text.lower() for text in texts} == {"b1.txt", "b2.txt"}, builder
    printed = capsys.readouterr().out.replace("json", "txt")  # without that of `read`
    counts = re.findall("passed over 4 hidden .*", printed)
    assert len(counts) == len(found) - 1  # and `read`'s
    for count in counts:
        said(count, ".Trash-1000, ._b1.txt, .ipynb_checkpoints")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to nothing": (lambda folder: (folder / "x.txt").symlink_to("/nowhere"), "x.txt"),
    "link of a folder to nothing": (lambda folder: (folder / "train").symlink_to("/nowhere"), "train"),
    "pipe": (lambda folder: os.mkfifo(folder / "x.txt"), "x.txt"),
    "device": (lambda folder: (folder / "x.txt").symlink_to("/dev/zero"), "x.txt"),
    "folder": (lambda folder: (folder / "x.txt").mkdir(), "x.txt"),
    "link in a circle": (lambda folder: (folder / "again").symlink_to(folder), "again"),
    "not UTF-8": (lambda folder: Path(os.fsdecode(bytes(folder) + b"/caf\xe9.txt")).write_text("x"), r"caf\xe9.txt"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_entry_that_is_no_readable_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "texts", "b1.txt")
    spoil, name = ODD[kind]
    spoil(tmp_path / "texts")
    options = ("--source", tmp_path / "texts", "--out", tmp_path / "out", "--split-by-hash", "train=1")
    build_refused("text", *options, named=(tmp_path / "texts" / name,))
    assert not (tmp_path / "out").exists()


def test_links_to_folders_are_read(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "test/b1.txt")
    write(tmp_path / "texts", "train/b2.txt")
    (tmp_path / "texts" / "test").symlink_to(tmp_path / "elsewhere" / "test")
    assert read(tmp_path / "texts")[0] == {"test/b1.txt": "test", "train/b2.txt": "train"}


def test_several_sources_that_are_named_as_splits_are_these_splits(tmp_path: Path) -> None:
    for name in ("train/b.txt", "dev/b.txt"):
        write(tmp_path, name)
    splits = texts_of("--source", tmp_path / "train", tmp_path / "dev")
    titles = {split: [each.title for each in found] for split, found in splits.items()}
    assert titles == {"train": ["b"], "validation": ["b"]}


@pytest.mark.parametrize(
    ("builder", "names", "options", "named"),
    [
        ("text", ["train/test-0-of-1.jsonl"], [], ("train/test-0-of-1.jsonl", "--split-by-hash")),
        *(
            ("text", ["data/test-0-of-1.jsonl"], [share, "0.1"], ("--validation", "--test", "--split-by-hash"))
            for share in ("--validation", "--test")
        ),
        ("pg19", ["train/1.txt", "valid/2.txt"], [], ("source/valid ",)),
    ],
)
def test_a_name_of_two_splits_and_folders_of_other_names_are_refused(
    tmp_path: Path, builder: str, names: list[str], options: list[str], named: tuple[str, ...]
) -> None:
    for name in names:
        write(tmp_path / "source", name)
    build_refused(builder, "--source", tmp_path / "source", "--out", tmp_path / "out", *options, named=named)


# A text is in UTF-8; what only decodes as UTF-8 is none.


SENTENCES = {"en": "Hello world in UTF sixteen. " * 20, "ru": "Привет, мир: это строки. " * 20}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-32"])
@pytest.mark.parametrize("language", SENTENCES)
def test_a_text_of_another_encoding_is_refused_with_or_without_a_byte_order_mark(
    tmp_path: Path, encoding: str, language: str
) -> None:
    source = tmp_path / "u.txt"
    source.write_bytes(SENTENCES[language].encode(encoding))
    with pytest.raises(UnusableError, match=rf"{source.name}.* UTF-8.*iconv"):
        texts_of("--source", source, *TRAIN)


def test_a_program_is_no_text_and_a_few_control_characters_are(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(128)) * 20)
    with refused(UnusableError, path, "UTF-8", "iconv"):
        texts_of("--source", path, *TRAIN)
    for text in ("a\0b\n", "A log\x1b[31m in red\x1b[0m.\f\v\r\n" * 9, "\0" + "a long text " * 9):
        path.write_bytes(text.encode())
        found = texts_of("--source", path, *TRAIN)["train"]
        assert found[0].text() == text.replace("\r\n", "\n")

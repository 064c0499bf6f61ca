"""Tokenizers of published models as they come: ids, texts and chats are those of AutoTokenizer."""

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer, write_folder
from dist_mem.data.tokenizers.registry import find_tokenizer, load_tokenizer, save_tokenizer
from dist_mem.errors import UnusableError
from tests.support.messages import refused
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.published_tokenizers import PUBLISHED, save_published  # noqa: E402

NUM_TEXTS = 10_000
ODD = [
    *("<|endoftext|>", "<|begin_of_text|>", "<s>", "</s>", "<think>", "<|im_end|>", "<unk>", "<0x41>", "\u2581", " "),
    *("  ", "\n", "\n\n", "\t", "\r\n", "\u00e9", "e\u0301", "\u65e5\u672c\u8a9e", "\U0001f642", "\u200d", "\0"),
    *("12345", "'S", "'ll", "\u0130", "\ufb01", "\u3000", "\u0645\u0631", "A\u030a", "\ud55c", "\u1112\u1161\u11ab"),
]
CODES = [*range(32, 127), *range(160, 1000), *range(0x3000, 0xD000)]


@cache
def generated(num: int) -> list[str]:
    """Pieces of a page, odd characters and names of special tokens, and random characters, in any order."""
    draw, page = random.Random(0), (ROOT / "README.md").read_text(encoding="utf-8")

    def part() -> str:
        place = draw.randrange(len(page))
        letters = map(chr, draw.choices(CODES, k=5))
        return draw.choice((page[place : place + draw.randrange(60)], draw.choice(ODD), "".join(letters)))

    return ["", *("".join(part() for _ in range(draw.randrange(1, 12))) for _ in range(num - 1))]


@pytest.fixture(scope="module", params=PUBLISHED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_published(request.param, tmp_path_factory.mktemp("published"))


def opened(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_ids_texts_and_chats_are_those_of_auto_tokenizer_also_after_saving(folder: Path, tmp_path: Path) -> None:
    theirs, texts = opened(folder), generated(NUM_TEXTS)
    read = find_tokenizer(folder)
    save_tokenizer(read, tmp_path / "data")
    ours = load_tokenizer(tmp_path / "data")
    assert isinstance(ours, HuggingFaceTokenizer)
    assert (ours.fingerprint, ours.pieces) == (read.fingerprint, read.pieces)
    for text, wanted in zip(texts, theirs(texts, add_special_tokens=False)["input_ids"], strict=True):
        ids = ours.encode(text)
        assert ids.tolist() == wanted, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    (tmp_path / "written").mkdir()
    write_folder(ours, tmp_path / "written")
    again = opened(tmp_path / "written")
    assert again(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert again.chat_template == theirs.chat_template
    assert ours.eos_id == theirs.eos_token_id
    assert ours.bos_id == (theirs.get_vocab()["<|endoftext|>"] if theirs.bos_token is None else theirs.bos_token_id)
    assert ours.vocab_size == json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def test_each_token_begins_at_the_character_of_its_first_byte(folder: Path) -> None:
    """Where the pieces are the text; else in order, and at the characters of its whole words."""
    ours = find_tokenizer(folder)
    for text in generated(500):
        ids, starts = ours.encode_with_offsets(text)
        assert ids.tolist() == ours.encode(text).tolist()
        assert all(first <= second for first, second in pairwise(starts.tolist())), text
        if b"".join(ours.pieces[token] for token in ids.tolist()) == text.encode():
            assert starts.tolist() == Tokenizer.encode_with_offsets(ours, text)[1].tolist(), text
    ids, starts = ours.encode_with_offsets("the memory of the memory")
    assert ours.decode(ids[starts >= len("the memory of the")]).strip() == "memory"


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def change(folder: Path, name: str, **values: Any) -> None:
    write(folder, name, json.loads((folder / name).read_text(encoding="utf-8")) | values)


CHAT = "{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
CHATS: dict[str, Callable[[Path], None]] = {
    "one, as a file": lambda folder: write(folder, "chat_template.jinja", f"{CHAT}a"),
    "several, in the settings": lambda folder: change(folder, "tokenizer_config.json", chat_template=named_chats()),
    "several, as files": lambda folder: write_chats(folder),
    "several, none of them the default": lambda folder: change(
        folder, "tokenizer_config.json", chat_template=named_chats()[1:]
    ),
}


def named_chats() -> list[dict[str, str]]:
    return [{"name": name, "template": f"{CHAT}{name}"} for name in ("default", "tool_use", "rag")]


def write_chats(folder: Path) -> None:
    write(folder, "chat_template.jinja", f"{CHAT}default")
    (folder / "additional_chat_templates").mkdir()
    write(folder, "additional_chat_templates/tool_use.jinja", f"{CHAT}tool_use")


@pytest.mark.parametrize("place", CHATS)
def test_every_chat_template_travels_with_the_tokenizer(place: str, tmp_path: Path) -> None:
    folder, written = save_published("llama3", tmp_path / "chats"), tmp_path / "written"
    CHATS[place](folder)
    save_tokenizer(find_tokenizer(folder), tmp_path / "data")
    ours = load_tokenizer(tmp_path / "data")
    assert isinstance(ours, HuggingFaceTokenizer)
    written.mkdir()
    write_folder(ours, written)
    theirs = opened(folder).chat_template
    assert isinstance(theirs, dict if "several" in place else str)
    assert opened(written).chat_template == theirs


@pytest.mark.parametrize("name", ["../out.json", "/tmp/out.json", "a/../../out.json", ""])
def test_a_tokenizer_has_no_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    read = find_tokenizer(save_published("llama3", tmp_path / "sound"))
    assert isinstance(read, HuggingFaceTokenizer)
    read.files[name] = "{}"
    with refused(ValueError, "files", repr(name)):
        HuggingFaceTokenizer.from_content(read.content())


def nest_too_deep(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):  # which would say that it is one of Hugging Face
        (folder / name).unlink()
    write(folder, "tokenizer.json", "[" * 10**5)


def take_special_tokens(folder: Path) -> None:
    change(folder, "tokenizer_config.json", bos_token=None, eos_token=None)
    change(folder, "tokenizer.json", added_tokens=[], post_processor=None)


PROGRAM = {"auto_map": {"AutoTokenizer": ["own.py", "own.py"]}, "tokenizer_class": "OwnTokenizer"}
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged": (lambda folder: write(folder, "tokenizer.json", '{"model": '), "tokenizer.json"),
    "too deep": (nest_too_deep, "tokenizer.json"),
    "no tokenizer": (lambda folder: write(folder, "tokenizer.json", {"model": {"type": "BPE"}}), ""),
    "of another model": (lambda folder: change(folder, "config.json", vocab_size=400), "vocab_size 400"),
    "wrong sizes": (lambda folder: change(folder, "config.json", vocab_size="x"), "config.json"),
    "nothing before a document": (lambda folder: take_special_tokens(folder), "bos_token"),
    "gone": (lambda folder: (folder / "tokenizer.json").unlink(), ""),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_folder_that_cannot_be_used_is_named(fault: str, tmp_path: Path) -> None:
    folder = save_published("llama3", tmp_path / "bad")
    do, named = BAD[fault]
    do(folder)
    with refused(UnusableError, folder, named):
        find_tokenizer(folder)


@pytest.mark.parametrize(
    "files",
    [
        ("vocab.json",),
        ("tokenizer.model",),
        ("vocab.json", "tokenizer_config.json"),
        ("vocab.json", "config.json", "tokenizer_config.json"),
    ],
)
def test_files_that_do_not_say_of_which_kind_they_are_lack_a_configuration(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    for name in files:
        write(tmp_path, name, {})
    with refused(UnusableError, tmp_path, "config.json with a model_type or tokenizer_config.json with a tokenizer_"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{"])
def test_settings_in_a_data_directory_that_are_damaged_are_refused_when_it_is_opened(
    content: str, tmp_path: Path
) -> None:
    read = find_tokenizer(save_published("llama3", tmp_path / "sound"))
    assert isinstance(read, HuggingFaceTokenizer)
    read.files["tokenizer_config.json"] = content
    save_tokenizer(read, tmp_path)
    with refused(ValueError, tmp_path / "tokenizer.huggingface.json"):
        load_tokenizer(tmp_path)


def test_a_program_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = save_published("llama3", tmp_path / "own")
    (folder / "tokenizer.json").unlink()
    change(folder, "tokenizer_config.json", **PROGRAM)
    write(folder, "own.py", "raise SystemExit('it was run')")
    with refused(UnusableError, folder):
        find_tokenizer(folder)

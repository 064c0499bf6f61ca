"""Weights are of ids: a folder's tokens are compared with those of the data, whatever their number."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import DataConfig, ModelConfig
from dist_mem.data.metadata import ShardError
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import BytePairTokenizer, train_byte_pairs, write_byte_pairs
from dist_mem.data.tokenizers.fast import fast_tokenizer
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer
from dist_mem.data.tokenizers.registry import KINDS, find_tokenizer, load_tokenizer, save_tokenizer
from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.evaluation.export_transformers import write_tokenizer
from dist_mem.hf.vocabulary import compare_tokens
from tests.support.jobs import write_config
from tests.support.llama_models import SIZES, llama_config, save_random_llama
from tests.support.messages import refused, said_line
from tests.support.own_process import in_child
from tests.support.published_tokenizers import save_published

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
TEXTS = (
    "he was an old man who fished alone in a skiff in the gulf stream\nand he had gone eighty four days now\n" * 9,
    "it was the best of times, it was the worst of times\nit was the age of wisdom, the age of foolishness\n" * 9,
)
SIZE = 264
NAMES = ("bytes", "words", "gpt2", "huggingface", "sentencepiece", "sentencepiece unigram")


def tokenizers_of(text: str) -> dict[str, Tokenizer]:
    """One of every kind, and of every kind of SentencePiece; of a size that does not depend on the text."""
    lines = text.splitlines()
    found = (
        BytesTokenizer(),
        WordTokenizer(["<eos>", "<unk>", *list(dict.fromkeys(text.split()))[:4]]),
        pairs := train_byte_pairs([text], vocab_size=SIZE),
        HuggingFaceTokenizer(
            {"tokenizer.json": fast_tokenizer(pairs, adds_bos=True).to_str()}, bos_id=pairs.bos_id, vocab_size=SIZE + 5
        ),
        train_pieces(lines, vocab_size=SIZE + 20),
        train_pieces(lines, vocab_size=SIZE + 20, model_type="unigram"),
    )
    assert {tokenizer.kind for tokenizer in found} == KINDS.keys()
    return dict(zip(NAMES, found, strict=True))


def folders_of(kind: str, tokenizer: Tokenizer, root: Path) -> Iterator[Path]:
    """Folders in Hugging Face's layout with this tokenizer, in every form that it has there."""
    fast, pairs, model = (root / name for name in ("fast", "pairs", "model"))
    for folder in (fast, pairs, model):
        folder.mkdir(parents=True)
    if isinstance(tokenizer, BytePairTokenizer):
        write_byte_pairs(tokenizer, pairs)
        yield pairs
    if isinstance(tokenizer, SentencePieceTokenizer):
        (model / "tokenizer.model").write_bytes(tokenizer.model)
        yield model
    if "unigram" not in kind:
        write_tokenizer(tokenizer, fast, adds_bos=True, purpose="a test")
        yield fast


def model_of(folder: Path) -> Any:
    return llama_config(model={"pretrained": str(folder)}).model


@pytest.mark.parametrize("kind", NAMES)
def test_the_tokens_of_a_folder_are_those_of_its_tokenizer_and_of_no_other_of_that_size(
    kind: str, tmp_path: Path
) -> None:
    ours, other = (tokenizers_of(text)[kind] for text in TEXTS)
    assert ours.vocab_size == other.vocab_size
    for folder in folders_of(kind, ours, tmp_path):
        assert compare_tokens(model_of(folder), ours) is None
        if kind != "bytes":  # there is one
            with refused(UnusableError, folder, "data.path"):
                compare_tokens(model_of(folder), other)


def test_a_folder_without_a_tokenizer_that_is_read_is_remarked(tmp_path: Path) -> None:
    remark = compare_tokens(model_of(tmp_path), BytesTokenizer())
    assert remark and "nobody can know" in remark
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n", encoding="utf-8")  # of tiktoken
    assert compare_tokens(model_of(tmp_path), BytesTokenizer()) == remark


WRONG: list[Any] = [
    None,
    1,
    "x",
    [],
    [1],
    {},
    {"model": 1},
    {"model": {"vocab": None}},
    {"model": {"vocab": {"a": "b"}}},
]


def test_a_damaged_tokenizer_file_is_refused_by_its_name(tmp_path: Path) -> None:
    for name, wrong in {"vocab.json": [*WRONG[:5], {"a": -1}, {"a": 1.5}], "tokenizer.json": WRONG}.items():
        path = tmp_path / name
        for content in wrong:
            path.write_text(json.dumps(content), encoding="utf-8")
            with refused(UnusableError, f"{path} is damaged"):
                compare_tokens(model_of(tmp_path), BytesTokenizer())
        path.write_text("{", encoding="utf-8")
        with refused(UnusableError, f"{path} is damaged"):
            compare_tokens(model_of(tmp_path), BytesTokenizer())


VALUES: list[Any] = [None, 1.5, "x", -1, [["a"]], {"type": 1}]
READ = (
    *("model", "vocab", "merges", "pre_tokenizer", "added_tokens", "id", "content", "vocabulary", "a", "type"),
    *("files", "tokenizer.json", "bos_id", "vocab_size"),
)


def changed(content: Any) -> Iterator[Any]:
    """The content of a JSON file with another value in one place, whichever it is."""
    yield from VALUES
    for key in [key for key in content if key in READ] if isinstance(content, dict) else range(min(1, len(content))):
        inner = changed(content[key]) if isinstance(content[key], dict | list) else VALUES
        for value in inner:
            copied = content.copy()
            copied[key] = value
            yield copied


def test_values_of_every_type_in_a_tokenizer_file_are_read_or_refused(tmp_path: Path) -> None:
    tokenizer = train_byte_pairs([TEXTS[0]], vocab_size=SIZE)
    for name in ("pairs", "fast"):
        (tmp_path / name).mkdir()
    write_byte_pairs(tokenizer, tmp_path / "pairs")
    write_tokenizer(tokenizer, tmp_path / "fast", adds_bos=True, purpose="a test")
    save_tokenizer(tokenizer, tmp_path / "own")
    save_tokenizer(tokenizers_of(TEXTS[0])["huggingface"], tmp_path / "published")

    def load(folder: Path) -> None:
        with suppress(ValueError):
            compare_tokens(model_of(folder), tokenizer)

    own = (f"own/{BytePairTokenizer.file_name}", f"published/{HuggingFaceTokenizer.file_name}")
    readers = {"pairs/vocab.json": load, "fast/tokenizer.json": load, **dict.fromkeys(own, load_tokenizer)}
    for name, read in readers.items():
        path = tmp_path / name
        read(path.parent)
        texts = [json.dumps(content) for content in changed(json.loads(path.read_text(encoding="utf-8")))]
        for text in (*texts, "["):
            path.write_text(text, encoding="utf-8")
            with suppress(ValueError):
                read(path.parent)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., Path]]:
    """A Llama of the first text with its tokenizer, and a function that writes a training on either text."""
    root = tmp_path_factory.mktemp("pretrained")
    for number, text in enumerate(TEXTS):
        source = root / f"{number}.txt"
        source.write_text(text * 40, encoding="utf-8")
        document = SourceDocument(id="1", title="t", source=source)
        splits = {"train": [document], "validation": [document]}
        build_dataset(splits, root / f"data{number}", name="x", tokenizer=train_byte_pairs([text], vocab_size=SIZE))

    def configured(number: int, **model: Any) -> Path:
        kind = {"kind": "llama", "num_positions": 64, "dropout": 0.0, **model}
        small = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
        path = root / f"run{number}-{len(model)}.yaml"
        return write_config(
            path, root / f"data{number}", root / path.stem, {"model": kind, "memory": {"mem_len": 16}, "train": small}
        )

    assert main(["export", str(configured(0)), "--out", str(root / "hub"), "--format", "transformers"]) == 0
    return root / "hub", configured


def test_training_and_export_refuse_the_tokens_of_another_tokenizer_before_anything_is_written(
    pretrained: tuple[Path, Callable[..., Path]],
    single_process: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder, configured = pretrained
    right, other = (str(configured(number, pretrained=str(folder))) for number in (0, 1))
    out = tmp_path / "out"
    commands = [["train", other, "--check"], ["train", other], ["export", other, "--out", str(out)]]
    for command in commands:
        assert main([*command, *([f"run_dir={out}"] if command[0] == "train" else [])]) == 2
        said_line(capsys.readouterr().err, "data.path", "tokenizer.json")
        assert not out.exists()
    assert main(["train", right, "--check"]) == 0
    assert "nobody can know" not in capsys.readouterr().out
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["train", other, "--check", f"model.pretrained={bare}"]) == 0
    assert "nobody can know" in capsys.readouterr().out


def test_a_qwen2_of_any_tokenizer_is_exported_with_the_ids_of_its_training(
    pretrained: tuple[Path, Callable[..., Path]], tmp_path: Path
) -> None:
    """transformers opens Qwen2's own tokenizer for a Qwen2, whatever class the folder names."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    hub, text = tmp_path / "hub", "cafe\u0301 in 1984"
    assert main(["export", str(pretrained[1](0, qkv_bias=True)), "--out", str(hub), "--format", "transformers"]) == 0
    ours = find_tokenizer(hub)
    for trusted in (None, True):
        opened = transformers.AutoTokenizer.from_pretrained(hub, trust_remote_code=trusted)
        assert opened(text)["input_ids"] == [ours.bos_id, *ours.encode(text).tolist()]


def test_a_folder_of_hugging_face_is_no_damaged_data_directory(pretrained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = pretrained
    with refused(ShardError, folder / "tokenizer"):
        load_tokenizer(folder)
    llama = tmp_path / "llama"
    shutil.copytree(folder, llama, ignore=shutil.ignore_patterns("tokenizer"))
    with refused(ShardError, f"--tokenizer-from {llama}"):
        load_tokenizer(llama)
    (llama / "tokenizer.json").unlink()
    with refused(ShardError, f"--tokenizer-from {llama}"):
        load_tokenizer(llama)


def run_command(arguments: list[str]) -> None:
    assert main(arguments) == 0


@pytest.mark.parametrize("kind", ["llama3", "qwen"])
def test_a_published_model_is_trained_with_its_own_tokenizer_as_the_message_says_and_exported_with_it(
    kind: str, pretrained: tuple[Path, Callable[..., Path]], single_process: None, capsys: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, books = save_published(kind, tmp_path / "published"), tmp_path / "books"
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    qwen = kind == "qwen"
    save_random_llama(folder, "Qwen2" if qwen else "Llama 2", vocab_size=size)
    unbuilt = DataConfig(path=str(tmp_path / "data"))
    assert vocab_size_of(unbuilt, ModelConfig(kind="llama", pretrained=str(folder))) == size
    model = {"kind": "llama", **SIZES, "qkv_bias": qwen, "tie_embeddings": qwen, "dropout": 0.0, "num_layers": 3}
    sizes = [f"model.{key}={json.dumps(value)}" for key, value in {**model, "pretrained": str(folder)}.items()]
    configured = [str(pretrained[1](0)), *sizes, "memory.mem_len=16", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *configured]) == 2
    (remedy,) = re.findall("--tokenizer-from [^)]*", capsys.readouterr().err)
    for split in ("train", "validation"):
        (books / split).mkdir(parents=True)
        (books / split / "1.txt").write_text(f"{TEXTS[0] * 20}cafe\u0301 <|endoftext|> {split}", encoding="utf-8")
    built = ["data", "build", "text", "--source", str(books), "--out", str(tmp_path / "data"), *remedy.split()]
    assert main(built) == 0
    assert main(["data", "verify", str(tmp_path / "data")]) == 0
    in_child(run_command, ["train", *configured, f"data.path={tmp_path / 'data'}"])
    assert main(["generate", str(tmp_path / "run"), "--prompt", TEXTS[0][:40], "--tokens", "4"]) == 0
    hub = tmp_path / "hub"
    assert main(["export", str(tmp_path / "run"), "--out", str(hub), "--format", "transformers"]) == 0
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(str(place)) for place in (folder, hub))
    assert ours(TEXTS[0])["input_ids"] == theirs(TEXTS[0])["input_ids"]
    assert (ours.chat_template, ours.eos_token) == (theirs.chat_template, theirs.eos_token)
    assert find_tokenizer(hub).fingerprint == find_tokenizer(folder).fingerprint
    (begin,) = re.findall(r'tokenizer\("(.*)It was', (hub / "README.md").read_text(encoding="utf-8"))
    assert ours(f"{begin}It was")["input_ids"].count(find_tokenizer(hub).bos_id) == 1

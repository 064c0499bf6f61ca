"""The registry of tokenizers: their kinds, and how a data directory stores its tokenizer.

A data directory contains its tokenizer as tokenizer.json (kind, sizes, fingerprint) and the file of that kind:
tokenizer.model, a plain SentencePiece model; tokenizer.words, one word per line; tokenizer.bpe.json, GPT-2's byte
pairs; or tokenizer.huggingface.json, the files of a published model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_mem.data.build_record import built_splits
from dist_mem.data.metadata import REMEDY, ShardError, read_metadata, reading
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import BytePairTokenizer
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer, read_folder
from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, integer, optional, read_json, record, text
from dist_mem.runtime.files import read_regular, write_bytes

FORMAT_VERSION = 1
JSON_NAME = "tokenizer.json"
TOKENIZER_DIR = "tokenizer"  # in a checkpoint, and in an export for transformers, whose own files have such names
_PUBLISHED = ("config.json", "tokenizer_config.json", "vocab.json")  # a folder in Hugging Face's layout has one
_MODEL = "tokenizer.model"  # or this one, but so has a data directory that has lost its tokenizer.json
_ID = integer(high=2**31 - 1)
_SCHEMA = record(
    {"kind": text, "vocab_size": _ID, "bos_id": optional(_ID), "fingerprint": text, "recipe": text}, is_open=True
)
KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind
    for kind in (SentencePieceTokenizer, BytesTokenizer, WordTokenizer, BytePairTokenizer, HuggingFaceTokenizer)
}
FILE_NAMES = tuple(kind.file_name for kind in KINDS.values() if kind.file_name)  # a data directory has at most one


def save_tokenizer(tokenizer: Tokenizer, data_dir: Path | str, *, recipe: str = "") -> None:
    """Write the tokenizer into a data directory, tokenizer.json last."""
    data_dir = Path(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(tokenizer, recipe=recipe).items():
        write_bytes(data_dir / name, content)


def tokenizer_files(tokenizer: Tokenizer, *, recipe: str = "") -> dict[str, bytes]:
    """Return the files that `load_tokenizer` reads, name -> content, tokenizer.json last."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "fingerprint": tokenizer.fingerprint,
        "recipe": recipe,
    }
    content = tokenizer.content()
    model = {} if tokenizer.file_name is None or content is None else {tokenizer.file_name: content}
    return {**model, JSON_NAME: (json_text(metadata, indent=1) + "\n").encode()}


def read_tokenizer_metadata(data_dir: Path | str) -> dict[str, Any]:
    """Read tokenizer.json: format_version, kind, vocab_size, bos_id, fingerprint, recipe.

    Raises:
        ValueError: it is missing, damaged or of a newer format.
    """
    path = Path(data_dir) / JSON_NAME
    try:
        metadata = read_metadata(path, version=FORMAT_VERSION)
    except ShardError as error:
        if is_published(path.parent):
            raise ShardError(_of_published(path.parent)) from error
        raise
    check(metadata, _SCHEMA, path, ShardError, REMEDY)
    if metadata["kind"] not in KINDS:
        raise ShardError(f"{path}: unknown kind {metadata['kind']!r}; known are {', '.join(KINDS)}")
    return metadata


def _of_published(folder: Path) -> str:
    """Return why a folder in Hugging Face's layout is no data directory, and where the tokenizer for data is."""
    if (folder / TOKENIZER_DIR / JSON_NAME).is_file():
        return f"{folder} is an export for transformers; the tokenizer for data is {folder / TOKENIZER_DIR}"
    return (
        f"{folder} is a folder in Hugging Face's layout, not a data directory: dist-mem data build ... "
        f"--tokenizer-from {folder} builds one with its tokenizer"
    )


def is_published(folder: Path) -> bool:
    """Return whether a folder is in Hugging Face's layout, as that of a published model, and no data directory."""
    if any((folder / name).is_file() for name in _PUBLISHED):
        return True
    path = folder / JSON_NAME
    if not path.is_file():
        return False
    with suppress(ValueError):
        content = read_json(path, ShardError)
        return isinstance(content, dict) and "model" in content and "format_version" not in content
    return False  # damaged


def find_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a data directory, of an export, or of a folder in Hugging Face's layout.

    Raises:
        ValueError: a file is missing, damaged or of a newer format; names it.
        UnusableError: there is none, or a library is not installed.
    """
    folder = Path(folder)
    if (folder / TOKENIZER_DIR / JSON_NAME).is_file():
        return load_tokenizer(folder / TOKENIZER_DIR)
    is_bare = (folder / _MODEL).is_file() and not (folder / JSON_NAME).exists() and not built_splits(folder)
    if is_bare or is_published(folder):
        return read_folder(folder)
    if not (folder / JSON_NAME).exists():
        raise UnusableError(
            f"{folder} has no {JSON_NAME}: give --tokenizer-from a data directory, an export, or the folder of a "
            "published model"
        )
    return load_tokenizer(folder)


def load_tokenizer(data_dir: Path | str) -> Tokenizer:
    """Load the tokenizer of a data directory.

    Raises:
        ValueError: a file is missing, damaged or of a newer format.
        UnusableError: the library of this kind is not installed.
    """
    metadata = read_tokenizer_metadata(data_dir)
    return read_described(Path(data_dir) / (KINDS[metadata["kind"]].file_name or JSON_NAME), metadata)


def read_described(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer of a file that tokenizer.json describes; where the kind has none, the path is that of it.

    Raises:
        ValueError, UnusableError: as `load_tokenizer`; begins with the path.
    """
    with reading(path, ": build the dataset again, or copy it from where it was built"):
        content = read_regular(path)
    try:
        tokenizer = KINDS[metadata["kind"]].from_content(content)
    except UnusableError:  # a ValueError too, but a library is missing and the file is whole
        raise
    except (RuntimeError, ValueError) as error:
        raise ShardError(f"{path} is damaged ({error}): build the dataset again") from error
    stated = (metadata["fingerprint"], metadata["vocab_size"], metadata["bos_id"])
    if (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.bos_id) != stated:
        raise ShardError(f"{path} is another tokenizer than {JSON_NAME} describes: build the dataset again")
    return tokenizer


def train_sentencepiece(lines: Iterable[str], data_dir: Path | str, *, recipe: str = "", **options: Any) -> Tokenizer:
    """Run `train_pieces` with these lines and options, and save the tokenizer in a data directory."""
    tokenizer = train_pieces(lines, **options)
    save_tokenizer(tokenizer, data_dir, recipe=recipe)
    return tokenizer

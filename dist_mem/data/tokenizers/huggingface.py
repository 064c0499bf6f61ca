"""The tokenizer of a folder in Hugging Face's layout, as it comes: of a Llama, Qwen, Mistral, GPT-2.

`read_folder` opens the folder as AutoTokenizer does (tokenizer.json; or, beside a config.json or tokenizer_config.json,
vocab.json and merges.txt or a SentencePiece tokenizer.model, which transformers converts), and keeps the files that
transformers saves of it, with the chat template. The library `tokenizers` encodes with them. Three things are as there,
and differ from our other kinds:

- Text changes where the tokenizer changes it: Qwen composes accents (NFC), Llama 2 puts a space before a text.
- The names of special tokens in a text, as `<|endoftext|>`, are those tokens.
- Some have no BOS. What comes before a document is then the `bos_token_id` of config.json, `<|endoftext|>` or EOS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, byte_alphabet
from dist_mem.data.tokenizers.sentencepiece import SPACE
from dist_mem.data.tokenizers.words import word_bytes
from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, integer, list_of, optional, read_json, record, table, text
from dist_mem.runtime.files import read_regular
from dist_mem.runtime.names import is_plain_path

FAST_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
_MODEL_CONFIG = "config.json"
_PURPOSE = "the tokenizer of a published model"
_WHICH = {_MODEL_CONFIG: "model_type", CONFIG_NAME: "tokenizer_class"}  # either says of which kind other files are
_AGAIN = ": download the folder again"
_ID = integer(high=2**31 - 1)
IDS = table(_ID, keys=text)  # vocab.json: token -> id
_ADDED = record({"id": _ID, "content": text}, is_open=True)
WHOLE = record({"model": record({}, is_open=True)}, {"added_tokens": list_of(_ADDED)}, is_open=True)  # tokenizer.json
_SIZES = record({}, {"vocab_size": optional(_ID), "bos_token_id": optional(_ID)}, is_open=True)
_OWN = record({"files": table(text, keys=text), "bos_id": _ID, "vocab_size": _ID}, is_open=False)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`, with the files by which transformers opens it."""

    kind = "huggingface"
    keeps_text = False
    file_name = "tokenizer.huggingface.json"

    def __init__(self, files: Mapping[str, str], *, bos_id: int, vocab_size: int) -> None:
        """
        Args:
            files: path below the folder, joined by / -> content, among them tokenizer.json.
            bos_id: what comes before a document.
            vocab_size: rows of the model's embedding; ids that the tokenizer lacks have no text.

        Raises:
            ValueError: a file is damaged, or has an id that is not below `vocab_size`.
            UnusableError: the library `tokenizers` is not installed.
        """
        require("tokenizers", _PURPOSE)
        import tokenizers

        self.files = dict(files)
        content, settings = (json.loads(self.files.get(name, "{}")) for name in (FAST_NAME, CONFIG_NAME))
        try:
            # Without what comes around a text, which also moves the offsets of tokens behind their spaces.
            self.processor = tokenizers.Tokenizer.from_str(json_text({**content, "post_processor": None}))
        except Exception as error:  # the library raises no other class
            raise ValueError(f"{FAST_NAME}: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{CONFIG_NAME} is no object")
        self._eos = settings.get("eos_token")
        self.processor.no_truncation()
        self.processor.no_padding()
        names = {token: name for name, token in self.processor.get_vocab(with_added_tokens=True).items()}
        if max(names, default=-1) >= vocab_size or not 0 <= bos_id < vocab_size:
            raise ValueError(f"{FAST_NAME} has token {max(names, default=-1)}, but the model has {vocab_size} tokens")
        added = {token: entry.content for token, entry in self.processor.get_added_tokens_decoder().items()}
        special = {token for token, entry in self.processor.get_added_tokens_decoder().items() if entry.special}
        spell = spelling_of(content)
        pieces = {token: added[token].encode() if token in added else spell(name) for token, name in names.items()}
        super().__init__(
            [b"" if token in special or token == bos_id else pieces.get(token, b"") for token in range(vocab_size)],
            bos_id=bos_id,
            fingerprint=hashlib.sha256(f"{bos_id} {vocab_size} {self.files[FAST_NAME]}".encode()).hexdigest(),
        )

    def encode(self, text: str) -> np.ndarray:
        """Encode as `Tokenizer.encode`: the ids of AutoTokenizer with `add_special_tokens=False`."""
        return np.array(self.processor.encode(text, add_special_tokens=False).ids, dtype=np.int64).astype(self.dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of token ids as AutoTokenizer does: without special tokens, and the space before a text."""
        return str(self.processor.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self.processor.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64).astype(self.dtype), starts

    @property
    def eos_id(self) -> int:
        return next(iter(self.end_ids), self.bos_id)

    @property
    def end_ids(self) -> frozenset[int]:
        """The EOS that the files name, if they do: the published model was trained to write it."""
        name = self._eos.get("content") if isinstance(self._eos, dict) else self._eos
        found = self.processor.token_to_id(name) if isinstance(name, str) else None
        return frozenset() if found is None else frozenset({int(found)})

    @property
    def missing_bos(self) -> str:
        """What stands before a text in transformers, so that it begins with BOS: nothing if the tokenizer adds it."""
        import tokenizers

        whole = tokenizers.Tokenizer.from_str(self.files[FAST_NAME])
        is_added = whole.encode("").ids[:1] == [self.bos_id]
        return "" if is_added else str(self.processor.id_to_token(self.bos_id))

    def content(self) -> bytes:
        parts = {"files": self.files, "bos_id": self.bos_id, "vocab_size": self.vocab_size}
        return (json_text(parts, ensure_ascii=True, indent=0) + "\n").encode()

    @classmethod
    def from_content(cls, content: bytes) -> HuggingFaceTokenizer:
        parts = json.loads(content)
        problem = next(_OWN("", parts), None)
        if problem is not None or FAST_NAME not in parts["files"]:
            raise ValueError(problem or f"files lacks {FAST_NAME}")
        if wrong := [name for name in parts["files"] if not is_plain_path(name)]:
            raise ValueError(f"files has the name {wrong[0]!r}, which is no path below a folder")
        return cls(parts["files"], bos_id=parts["bos_id"], vocab_size=parts["vocab_size"])


def read_folder(folder: Path) -> HuggingFaceTokenizer:
    """Read the tokenizer of a folder in Hugging Face's layout.

    Where config.json is beside it, its `vocab_size` counts, as many models have more rows than tokens.

    Raises:
        UnusableError: a file is damaged, it is not a tokenizer that transformers opens without the folder's own
            program, its ids are not those of config.json, or a library is not installed; names the file.
    """
    for library in ("tokenizers", "transformers"):
        require(library, _PURPOSE)
    if (folder / FAST_NAME).is_file():
        check(read_json(folder / FAST_NAME, UnusableError, _AGAIN), WHOLE, folder / FAST_NAME, UnusableError, _AGAIN)
    sizes: dict[str, Any] = {}
    if (path := folder / _MODEL_CONFIG).is_file():
        sizes = read_json(path, UnusableError, _AGAIN)
        check(sizes, _SIZES, path, UnusableError, _AGAIN)
    opened = _open(folder)
    num_tokens = max(opened.get_vocab().values(), default=-1) + 1
    vocab_size = sizes.get("vocab_size") or num_tokens
    if vocab_size < num_tokens:
        raise UnusableError(
            f"{folder} has a tokenizer of {num_tokens:,} tokens, but {path} has vocab_size {vocab_size:,}: it is that "
            f"of another model{_AGAIN}"
        )
    candidates = (opened.bos_token_id, sizes.get("bos_token_id"), opened.get_vocab().get(END_OF_TEXT))
    bos_id = next((token for token in (*candidates, opened.eos_token_id) if token is not None), None)
    if bos_id is None:
        raise UnusableError(
            f"{folder} has no token that can come before a document: add a bos_token or eos_token to "
            f"{folder / CONFIG_NAME}"
        )
    try:
        return HuggingFaceTokenizer(_files_of(opened), bos_id=bos_id, vocab_size=vocab_size)
    except ValueError as error:
        raise UnusableError(f"{folder}: {error}{_AGAIN}") from error


def _open(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    from transformers import AutoTokenizer

    try:
        opened = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of transformers, tokenizers, SentencePiece, or of what a file lacks
        reason = str(error).strip().partition("\n")[0]
        lacks = not (folder / FAST_NAME).exists() and not any(_has(folder / name, _WHICH[name]) for name in _WHICH)
        ways = " or ".join(f"{name} with a {key}" for name, key in _WHICH.items())
        remedy = f": add its {ways}, which says of which kind it is" if lacks else _AGAIN
        raise UnusableError(f"{folder} has no tokenizer that transformers opens ({reason}){remedy}") from error
    if not getattr(opened, "is_fast", False):
        raise UnusableError(
            f"{folder} has a tokenizer of class {type(opened).__name__}, which is no fast one: convert it to "
            f"{FAST_NAME} with the library tokenizers"
        )
    return opened


def _has(path: Path, key: str) -> bool:
    """Return whether a JSON file has a key. Raises UnusableError if it is damaged."""
    content = read_json(path, UnusableError, _AGAIN) if path.is_file() else None
    return isinstance(content, dict) and content.get(key) is not None


def _files_of(opened: Any) -> dict[str, str]:
    """Return the files that transformers saves of a tokenizer, path below the folder -> content.

    Chat templates but the default one are in a folder of their own.
    """
    opened.backend_tokenizer.no_padding()
    opened.backend_tokenizer.no_truncation()
    opened.init_kwargs.pop("auto_map", None)  # it names a program of the folder, which is not saved
    with TemporaryDirectory() as folder:
        opened.save_pretrained(folder)
        saved = sorted(path for path in Path(folder).rglob("*") if not path.is_dir())
        return {path.relative_to(folder).as_posix(): read_regular(path).decode() for path in saved}


def write_folder(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    """Write the files by which AutoTokenizer opens the tokenizer."""
    for name, content in tokenizer.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def spelling_of(content: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return how the names of tokens in a tokenizer.json are spelled: name -> the UTF-8 bytes of its text."""
    if "ByteLevel" in _types([content.get("pre_tokenizer"), content.get("decoder")]):
        return of_alphabet()
    return word_bytes if content["model"].get("type") == "WordLevel" else _of_sentencepiece


def _types(part: Any) -> set[str]:
    """Return every `type` in a part of a tokenizer, which may be a sequence of parts."""
    parts: Iterable[Any] = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    own = {part["type"]} if isinstance(part, dict) and isinstance(part.get("type"), str) else set()
    return own.union(*map(_types, parts))


def of_alphabet() -> Callable[[str], bytes]:
    """Return the spelling of GPT-2's alphabet."""
    alphabet = byte_alphabet()
    return lambda name: bytes(alphabet[letter] for letter in name) if alphabet.keys() >= set(name) else name.encode()


def _of_sentencepiece(name: str) -> bytes:
    is_byte = len(name) == 6 and name.startswith("<0x") and name.endswith(">")
    return bytes([int(name[3:5], 16)]) if is_byte else name.replace(SPACE, " ").encode()

"""GPT-2's tokenizer: byte pairs over GPT-2's alphabet, in which every byte is a printable character.

It is read from a folder in Hugging Face's layout (vocab.json and merges.txt, or tokenizer.json) and stored as one file
with the vocabulary by id and the merges by rank: the same tokens give the same file, whichever layout they came from.
BOS is `<|endoftext|>`; in a text those characters have no special meaning. A text is encoded as a whole, as by GPT-2,
because how a newline is cut depends on the text after it. Source: Radford et al. 2019, sec. 2.2, and its code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import Schema, integer, leaf, optional, read_json, record, rows, table, text
from dist_mem.runtime.files import read_regular

END_OF_TEXT = "<|endoftext|>"
_PURPOSE = "a tokenizer of GPT-2's kind"
_ID = integer(high=2**31 - 1)
IDS = table(_ID, keys=text)  # vocab.json: token -> id
_ADDED = record({"id": _ID, "content": text}, is_open=True)
WHOLE = record({"model": record({}, is_open=True)}, {"added_tokens": rows(_ADDED)}, is_open=True)  # tokenizer.json
_MERGE = leaf("two tokens", lambda value: isinstance(value, str) or list(map(type, _items(value))) == [str, str])
_CUT = record({}, {"pre_tokenizer": optional(record({}, is_open=True))}, is_open=True)
_BYTE_LEVEL = record({"model": record({"vocab": IDS, "merges": rows(_MERGE)}, is_open=True)}, is_open=True)
_OWN = record({"vocabulary": rows(text), "merges": rows(text)}, is_open=True)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _matching(schema: Schema, value: Any) -> Any:
    """Return a value that matches the schema. Raises ValueError with the first problem."""
    problem = next(schema("", value), None)
    if problem is not None:
        raise ValueError(problem)
    return value


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte: printable bytes are their own characters, the others are 256, 257, ... in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


class BytePairTokenizer(Tokenizer):
    """A vocabulary by id and merges by rank, `first second`, both in GPT-2's alphabet."""

    kind = "gpt2"
    file_name = "tokenizer.bpe.json"

    def __init__(self, vocabulary: Sequence[str], merges: Sequence[str]) -> None:
        """
        Raises:
            ValueError: the vocabulary lacks a byte, `<|endoftext|>` or a token of a merge.
            UnusableError: the library `tokenizers` is not installed.
        """
        require("tokenizers", _PURPOSE)
        import tokenizers
        from tokenizers import models, pre_tokenizers

        self.vocabulary, self.merges = list(vocabulary), list(merges)
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        alphabet = byte_alphabet()
        missing = [token for token in (*alphabet, END_OF_TEXT) if token not in ids]
        if missing or len(ids) != len(self.vocabulary):
            raise ValueError(f"the vocabulary lacks {missing[0]!r}" if missing else "a token comes twice")
        pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in self.merges)]
        if bad := [pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()]:
            raise ValueError(f"the merge {bad[0]} is of tokens that the vocabulary lacks")
        foreign = [token for token in ids if token != END_OF_TEXT and not alphabet.keys() >= set(token)]
        if foreign:
            raise ValueError(
                f"the token {foreign[0]!r} has characters that stand for no byte in GPT-2's alphabet, so it is another "
                f"kind of token (an added one, as GPT-NeoX has)"
            )
        known = {token: bytes(alphabet[letter] for letter in token) for token in ids if token != END_OF_TEXT}
        self.processor = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
        self.processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        super().__init__(
            [known.get(token, b"") for token in self.vocabulary],
            bos_id=ids[END_OF_TEXT],
            fingerprint=hashlib.sha256(self.content()).hexdigest(),
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.processor.encode(text).ids, dtype=np.int64).astype(self.dtype)

    def content(self) -> bytes:
        parts = {"vocabulary": self.vocabulary, "merges": self.merges}
        return (json_text(parts, ensure_ascii=True, indent=0) + "\n").encode()

    @classmethod
    def from_content(cls, content: bytes) -> BytePairTokenizer:
        parts = _matching(_OWN, json.loads(content))
        return cls(parts["vocabulary"], parts["merges"])


def read_byte_pairs(folder: Path) -> BytePairTokenizer:
    """Read GPT-2's tokenizer in Hugging Face's layout: vocab.json and merges.txt, or else tokenizer.json.

    Raises:
        ValueError: neither exists, or it is another kind of tokenizer; names the file.
        UnusableError: the library `tokenizers` is not installed.
    """
    require("tokenizers", _PURPOSE)  # first: below, its error would blame the folder
    vocab_file, merges_file, whole = folder / "vocab.json", folder / "merges.txt", folder / "tokenizer.json"
    try:
        if vocab_file.exists() and merges_file.exists():
            lines = read_regular(merges_file).decode().split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            return _of_ids(_matching(IDS, read_json(vocab_file, UnusableError)), merges)
        if whole.exists():
            return _of_whole(_matching(WHOLE, read_json(whole, UnusableError)))
    except ValueError as error:
        raise ValueError(f"{folder} holds no tokenizer of GPT-2's kind: {error}") from error
    raise ValueError(f"{folder} has neither vocab.json and merges.txt nor tokenizer.json")


def _of_whole(parts: dict[str, Any]) -> BytePairTokenizer:
    _matching(_CUT, parts)
    model, cutter = parts["model"], parts.get("pre_tokenizer") or {}
    if model.get("type", "BPE") != "BPE" or cutter.get("type") != "ByteLevel" or cutter.get("add_prefix_space"):
        raise ValueError("tokenizer.json is not of byte pairs without a space put before the text")
    if parts.get("normalizer") or not cutter.get("use_regex", True):
        raise ValueError("tokenizer.json changes the text before it is encoded, or cuts it in another way than GPT-2")
    _matching(_BYTE_LEVEL, parts)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    return _of_ids(model["vocab"] | added, merges)


def _of_ids(vocab: dict[str, int], merges: list[str]) -> BytePairTokenizer:
    ranked = sorted(vocab, key=vocab.__getitem__)
    if [vocab[token] for token in ranked] != list(range(len(ranked))):
        raise ValueError("the ids of the vocabulary are not 0, 1, 2, ...")
    return BytePairTokenizer(ranked, merges)


def write_byte_pairs(tokenizer: BytePairTokenizer, folder: Path) -> None:
    """Write vocab.json and merges.txt, as `read_byte_pairs` and transformers read them."""
    ids = {token: index for index, token in enumerate(tokenizer.vocabulary)}
    (folder / "vocab.json").write_text(json_text(ids, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(tokenizer.merges) + "\n", encoding="utf-8")


def train_byte_pairs(texts: Iterable[str], *, vocab_size: int) -> BytePairTokenizer:
    """Train byte pairs on texts, at least 257 tokens, for use without a GPT-2.

    Args:
        texts: of any length; merges are counted over all of them.

    Raises:
        ValueError: vocab_size is too small, or too large for this text.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}, but must be at least 257: 256 bytes and {END_OF_TEXT}")
    require("tokenizers", _PURPOSE)
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    processor = tokenizers.Tokenizer(models.BPE())
    processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    processor.train_from_iterator(texts, trainer)
    model = json.loads(processor.to_str())["model"]
    if len(model["vocab"]) != vocab_size - 1:
        raise ValueError(f"vocab_size {vocab_size} is too large for this text: it gives {len(model['vocab']) + 1}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _of_ids({**model["vocab"], END_OF_TEXT: vocab_size - 1}, merges)

"""Tokenizers: SentencePiece and raw bytes behind one small face.

Both are lossless: `decode(encode(text)) == text` for every text. SentencePiece is trained without normalisation, with
one piece for every byte (byte fallback) and one for the newline, and text is always encoded line by line: the ids of
longer strings depend on how they were cut (unigram) and cost twice the time (BPE).

A data directory holds its tokenizer as tokenizer.json (kind, sizes, fingerprint) and, for SentencePiece, as
tokenizer.model, a plain SentencePiece model. SentencePiece writes a space as U+2581, and cannot tell the two apart in a
text; so a U+2581 of the text is encoded as its three bytes, and ids are decoded by a table of pieces, both here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from dist_mem.data.facts import ShardError, read_facts
from dist_mem.files import write_bytes, write_text

FORMAT_VERSION = 1
JSON_NAME = "tokenizer.json"
MODEL_NAME = "tokenizer.model"
SPACE = "\u2581"  # how SentencePiece writes a space
TRAINING_LINE_LEN = 4096  # characters; longer lines are cut for training, which would skip them
TRAINER_OPTIONS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "character_coverage": 0.9995,  # rarer characters are written as bytes
    "user_defined_symbols": ["\n"],
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "max_sentence_length": 8 * TRAINING_LINE_LEN,  # bytes
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,  # SentencePiece's way to say: none
    "num_threads": 4,  # written into the model (its pieces do not depend on it), so never the number of cores
    "minloglevel": 2,
}


class Tokenizer:
    """Text to token ids and back; subclasses say how text is cut into pieces."""

    kind: str  # "sentencepiece" | "bytes"

    def __init__(self, pieces: list[bytes], *, bos_id: int, fingerprint: str) -> None:
        """Take the UTF-8 bytes of every id (none for BOS and its like), and a fingerprint of the whole vocabulary."""
        self.pieces = pieces
        self.piece_bytes = np.array([len(piece) for piece in pieces])
        self.vocab_size = len(pieces)
        self.bos_id = bos_id
        self.fingerprint = fingerprint
        self.dtype = np.dtype(np.uint16 if len(pieces) <= 2**16 else np.uint32)  # of token ids

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (num_tokens,) uint16 (uint32 above 65,536 pieces), without BOS."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of token ids; BOS and its like are nothing, bytes of a character cut in two become U+FFFD."""
        pieces = self.pieces
        return b"".join([pieces[token] for token in np.asarray(ids, dtype=np.int64).tolist()]).decode(
            "utf-8", "replace"
        )

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids as `encode`, and for each the index in `text` of the character its first byte belongs to, int64."""
        ids = self.encode(text)
        ends = np.cumsum(self.piece_bytes[ids])
        text_bytes = np.frombuffer(text.encode(), dtype=np.uint8)
        characters = np.cumsum((text_bytes & 0xC0) != 0x80) - 1  # of each byte; continuation bytes are 0b10xxxxxx
        return ids, characters[ends - self.piece_bytes[ids]]

    def files(self) -> dict[str, bytes]:
        """What `save_tokenizer` writes besides tokenizer.json: name -> content."""
        return {}


class BytesTokenizer(Tokenizer):
    """One token a byte of UTF-8, and BOS: 257 ids."""

    kind = "bytes"

    def __init__(self) -> None:
        fingerprint = hashlib.sha256(b"dist_mem bytes tokenizer 1").hexdigest()
        super().__init__([bytes([byte]) for byte in range(256)] + [b""], bos_id=256, fingerprint=fingerprint)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model as `train_sentencepiece` makes it."""

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        """Take the content of tokenizer.model."""
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        space_ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.processor.bos_id() < 0 or not all(self.processor.is_byte(token) for token in space_ids):
            raise ValueError("this SentencePiece model has no BOS or no byte pieces: train it with train_sentencepiece")
        self._space_ids = np.array(space_ids, dtype=np.int32)
        pieces = [_piece_bytes(self.processor, token) for token in range(self.processor.vocab_size())]
        super().__init__(pieces, bos_id=self.processor.bos_id(), fingerprint=hashlib.sha256(model).hexdigest())

    def encode(self, text: str) -> np.ndarray:
        parts = [self._encode_plain(part) for part in text.split(SPACE)]
        between = [part for plain in parts for part in (self._space_ids, plain)]
        return np.concatenate(between[1:]).astype(self.dtype)

    def _encode_plain(self, text: str) -> np.ndarray:
        lines = list(io.StringIO(text, newline="\n"))  # with their newlines; str.splitlines cuts at more than "\n"
        if not lines:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate(self.processor.encode(lines, return_type="numpy", num_threads=1))

    def files(self) -> dict[str, bytes]:
        return {MODEL_NAME: self.model}


def train_sentencepiece(
    lines: Iterable[str],
    directory: Path | str,
    *,
    vocab_size: int = 32_000,
    model_type: str = "bpe",
    max_sentences: int = 2_000_000,
    seed: int = 0,
    recipe: str = "",
) -> Tokenizer:
    """Train a SentencePiece model and save it in a data directory. The same lines always give the same bytes.

    Args:
        lines: text of the train split, without newlines; an iterator of any length.
        vocab_size: pieces, among them 256 bytes, newline, unknown, BOS and EOS.
        model_type: "bpe" or "unigram"; unigram ids depend on how text is cut, see above.
        max_sentences: lines to train on; of more, this many are drawn evenly by `seed`.
        recipe: fingerprint of what the builder trained on, kept in tokenizer.json.

    Raises:
        ValueError: there is no text, or vocab_size is too large or too small for it.
    """
    sample = sample_lines(_training_lines(lines), max_sentences, seed=seed)
    if not sample:
        raise ValueError(
            "the train split holds no text to train a tokenizer on: give it documents, or take tokenizer_kind bytes"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **TRAINER_OPTIONS,
        )
    except RuntimeError as error:
        raise _vocabulary_error(error, vocab_size) from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    save_tokenizer(tokenizer, directory, recipe=recipe)
    return tokenizer


def sample_lines(lines: Iterable[str], max_lines: int, *, seed: int) -> list[str]:
    """At most `max_lines` lines, each line equally likely, in one pass that jumps over most (Li 1994, algorithm L)."""
    source = iter(lines)
    sample = list(islice(source, max_lines))
    draw = random.Random(seed)

    def uniform() -> float:
        return 1.0 - draw.random()  # (0, 1], for the logarithm

    weight = uniform() ** (1 / max_lines)
    while True:
        skip = int(math.log(uniform()) / math.log1p(-weight)) if weight < 1 else 0
        line = next(islice(source, skip, None), None)
        if line is None:
            return sample
        sample[draw.randrange(max_lines)] = line
        weight *= uniform() ** (1 / max_lines)


def save_tokenizer(tokenizer: Tokenizer, data_dir: Path | str, *, recipe: str = "") -> None:
    """Write the tokenizer into a data directory, tokenizer.json last."""
    data_dir = Path(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        write_bytes(data_dir / name, content)
    facts = {
        "format_version": FORMAT_VERSION,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "fingerprint": tokenizer.fingerprint,
        "recipe": recipe,
    }
    write_text(data_dir / JSON_NAME, json.dumps(facts, indent=1) + "\n")


def read_tokenizer_facts(data_dir: Path | str) -> dict[str, Any]:
    """The content of tokenizer.json: format_version, kind, vocab_size, bos_id, fingerprint, recipe.

    Raises:
        ValueError: it is missing, damaged or of a newer format.
    """
    path = Path(data_dir) / JSON_NAME
    facts = read_facts(path, newest=FORMAT_VERSION)
    for key in ("kind", "vocab_size", "bos_id", "fingerprint", "recipe"):
        if key not in facts:
            raise ShardError(f"{path} is damaged (it has no {key}): build the dataset again")
    return facts


def load_tokenizer(data_dir: Path | str) -> Tokenizer:
    """The tokenizer of a data directory.

    Raises:
        ValueError: a file is missing, damaged or of a newer format.
    """
    data_dir = Path(data_dir)
    facts = read_tokenizer_facts(data_dir)
    if facts["kind"] == BytesTokenizer.kind:
        tokenizer: Tokenizer = BytesTokenizer()
    elif facts["kind"] == SentencePieceTokenizer.kind:
        tokenizer = _load_sentencepiece(data_dir / MODEL_NAME)
    else:
        raise ValueError(f"{data_dir / JSON_NAME}: unknown kind {facts['kind']!r}; known are bytes and sentencepiece")
    if tokenizer.fingerprint != facts["fingerprint"]:
        raise ValueError(
            f"{data_dir / JSON_NAME} describes another tokenizer than the one beside it: build the dataset again"
        )
    return tokenizer


def _load_sentencepiece(path: Path) -> Tokenizer:
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: build the dataset again, or copy it from where it was built") from None
    except RuntimeError as error:
        raise ValueError(f"{path} is damaged ({error}): build the dataset again") from error


def _piece_bytes(processor: Any, token: int) -> bytes:
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    piece = processor.id_to_piece(token)
    return bytes([int(piece[3:5], 16)]) if processor.is_byte(token) else piece.replace(SPACE, " ").encode()


def _training_lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        for start in range(0, len(line), TRAINING_LINE_LEN):
            yield line[start : start + TRAINING_LINE_LEN]


def _vocabulary_error(error: RuntimeError, vocab_size: int) -> Exception:
    """SentencePiece's complaint in our words, where it is about the size of the vocabulary."""
    largest = re.search(r"Vocabulary size too high .*<= (\d+)", str(error))
    smallest = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    if largest:
        return ValueError(
            f"vocab_size {vocab_size} is too large for this text: the largest possible value is {largest[1]}"
        )
    if smallest:
        return ValueError(
            f"vocab_size {vocab_size} is too small for this text: the smallest possible value is {smallest[1]}"
        )
    return error

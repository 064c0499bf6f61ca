"""SentencePiece, trained without normalisation, with a piece for every byte (byte fallback) and one for the newline.

Text is always encoded line by line: the ids of longer strings depend on how they were cut (unigram) and take twice the
time (BPE). SentencePiece writes a space as U+2581, and cannot distinguish the two in a text. So this module encodes a
U+2581 of the text as its three bytes, and decodes ids with a table of pieces.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import sentencepiece

from dist_mem.data.tokenizers.base import Tokenizer

SPACE = "\u2581"  # how SentencePiece writes a space
TRAINING_LINE_LEN = 4096  # characters; longer lines are cut, because training would skip them
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
    "pad_id": -1,  # none
    "num_threads": 4,  # fixed, not the number of cores: it is written into the model, although no piece depends on it
    "minloglevel": 2,
}

_NO_TEXT = (
    "the train split holds no text to train a tokenizer on, as SentencePiece skips NUL and lines with U+2585: give it "
    "documents, or take tokenizer_kind bytes"
)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model from `train_sentencepiece`."""

    kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, model: bytes) -> None:
        """`model`: the content of tokenizer.model."""
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        space_ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.processor.bos_id() < 0 or not all(self.processor.is_byte(token) for token in space_ids):
            raise ValueError("this SentencePiece model has no BOS or no byte pieces: train it with train_sentencepiece")
        self._space_ids = np.array(space_ids, dtype=np.int32)
        pieces = [piece_bytes(self.processor, token) for token in range(self.processor.vocab_size())]
        super().__init__(pieces, bos_id=self.processor.bos_id(), fingerprint=hashlib.sha256(model).hexdigest())

    def encode(self, text: str) -> np.ndarray:
        parts = [self._encode_plain(part) for part in text.split(SPACE)]
        between = [part for plain in parts for part in (self._space_ids, plain)]
        return np.concatenate(between[1:]).astype(self.dtype)

    def _encode_plain(self, text: str) -> np.ndarray:
        lines = list(io.StringIO(text, newline="\n"))  # with their newlines; str.splitlines cuts at more than "\n"
        if not lines:
            return np.zeros(0, dtype=np.int32)
        if len(lines) == 1:  # a list starts a thread, which costs a sentence six times its encoding
            return self.processor.encode(lines[0], return_type="numpy")
        return np.concatenate(self.processor.encode(lines, return_type="numpy", num_threads=1))

    def content(self) -> bytes:
        return self.model

    @classmethod
    def from_content(cls, content: bytes) -> SentencePieceTokenizer:
        return cls(content)


def train_pieces(
    lines: Iterable[str],
    *,
    vocab_size: int = 32_000,
    model_type: str = "bpe",
    max_sentences: int = 2_000_000,
    seed: int = 0,
) -> SentencePieceTokenizer:
    """Train a SentencePiece model. The same lines always give the same bytes.

    Args:
        lines: text of the train split, without newlines; an iterator of any length.
        vocab_size: pieces, among them 256 bytes, newline, unknown, BOS and EOS.
        model_type: "bpe" or "unigram"; unigram ids depend on how text is cut, see above.
        max_sentences: largest number of lines to train on; of more lines, this many are sampled evenly with `seed`.

    Raises:
        ValueError: there is no text, or vocab_size is too large or too small for it.
    """
    sample = sample_lines(_training_lines(lines), max_sentences, seed=seed)
    if not sample:
        raise ValueError(_NO_TEXT)
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
        raise ValueError(_reason(str(error), vocab_size)) from error
    return SentencePieceTokenizer(model.getvalue())


def sample_lines(lines: Iterable[str], max_lines: int, *, seed: int) -> list[str]:
    """Sample at most `max_lines` lines, each equally likely, in one pass that skips most (Li 1994, algorithm L)."""
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


def piece_bytes(processor: Any, token: int) -> bytes:
    """Return the text of a token of a SentencePiece model; none of a control token or the unknown one."""
    if processor.is_control(token) or processor.is_unknown(token):
        return b""
    piece = processor.id_to_piece(token)
    return bytes([int(piece[3:5], 16)]) if processor.is_byte(token) else piece.replace(SPACE, " ").encode()


def _training_lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        for start in range(0, len(line), TRAINING_LINE_LEN):
            yield line[start : start + TRAINING_LINE_LEN]


def _reason(error: str, vocab_size: int) -> str:
    """Reword an error of SentencePiece's training."""
    if re.search(r"sentences_\.empty|all_chars_count", error):
        return _NO_TEXT
    if largest := re.search(r"Vocabulary size too high .*<= (\d+)", error):
        return f"vocab_size {vocab_size} is too large for this text: the largest possible value is {largest[1]}"
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"vocab_size {vocab_size} is too small for this text: the smallest possible value is {smallest[1]}"
    return f"SentencePiece cannot train vocab_size {vocab_size} on this text ({error.strip()}): try another size"

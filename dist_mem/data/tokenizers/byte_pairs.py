"""GPT-2's tokenizer: byte pairs over GPT-2's alphabet, in which every byte is a printable character.

It is stored as one file with the vocabulary by id and the merges by rank. A published GPT-2's is read as it comes
(huggingface.py); this kind is for those that are trained here, and for data of version 0.1.0. BOS is `<|endoftext|>`;
in a text those characters have no special meaning. A text is encoded as a whole, as by GPT-2, because how a newline is
cut depends on the text after it. Source: Radford et al. 2019, sec. 2.2, and its code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.runtime.extras import require
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import list_of, record, text

END_OF_TEXT = "<|endoftext|>"
_PURPOSE = "a tokenizer of GPT-2's kind"
_OWN = record({"vocabulary": list_of(text), "merges": list_of(text)}, is_open=True)


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
        parts = json.loads(content)
        problem = next(_OWN("", parts), None)
        if problem is not None:
            raise ValueError(problem)
        return cls(parts["vocabulary"], parts["merges"])


def write_byte_pairs(tokenizer: BytePairTokenizer, folder: Path) -> None:
    """Write vocab.json and merges.txt, as transformers reads them."""
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
    return BytePairTokenizer([*sorted(model["vocab"], key=model["vocab"].__getitem__), END_OF_TEXT], merges)

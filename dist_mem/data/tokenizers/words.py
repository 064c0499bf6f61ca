"""One token per word: text is cut at white space, for word-level corpora (WikiText, sorting).

The vocabulary is a list of words. If it contains `<eos>`, every line end becomes that token; if it contains `<unk>`,
all other words become that one. The amount of white space between two words is lost.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dist_mem.data.tokenizers.base import Tokenizer

EOS = "<eos>"
UNKNOWN = "<unk>"


class WordTokenizer(Tokenizer):
    """A tokenizer whose vocabulary is a list of words, followed by BOS."""

    kind = "words"
    keeps_text = False  # no white space, no unknown words
    file_name = "tokenizer.words"

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: the vocabulary, by id. Raises ValueError for an entry that is no word, or is repeated."""
        self.words = list(words)
        self.ids = {word: token for token, word in enumerate(self.words)}
        unusable = [word for word in self.words if word.split() != [word]]
        if unusable or len(self.ids) != len(self.words):
            bad = unusable or [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"the vocabulary has {bad[0]!r}, which is no word or comes twice")
        pieces = list(map(word_bytes, self.words))
        super().__init__([*pieces, b""], bos_id=len(pieces), fingerprint=hashlib.sha256(self.content()).hexdigest())

    def content(self) -> bytes:
        return "".join(f"{word}\n" for word in self.words).encode()

    @classmethod
    def from_content(cls, content: bytes) -> WordTokenizer:
        return cls(content.decode().split("\n")[:-1])

    def encode(self, text: str) -> np.ndarray:
        """Encode as `Tokenizer.encode`. Raises ValueError for a word that is not in a vocabulary without `<unk>`."""
        marked = text.replace("\n", f" {EOS} ") if EOS in self.ids else text
        return self._ids(marked.split())

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        pattern = r"[^\S\n]*(\n|\S+)" if EOS in self.ids else r"\s*(\S+)"
        found = list(re.finditer(pattern, text))
        words = [EOS if match[1] == "\n" else match[1] for match in found]
        return self._ids(words), np.array([match.start(1) for match in found], dtype=np.int64)

    def _ids(self, words: list[str]) -> np.ndarray:
        unknown = self.ids.get(UNKNOWN, -1)
        tokens = np.fromiter((self.ids.get(word, unknown) for word in words), dtype=np.int64, count=len(words))
        if unknown < 0 and (tokens < 0).any():
            word = words[int(np.flatnonzero(tokens < 0)[0])]
            raise ValueError(f"the word {word!r} is not in the vocabulary, and that has no {UNKNOWN}")
        return tokens.astype(self.dtype)


def word_bytes(word: str) -> bytes:
    """Return the text of a word of a vocabulary."""
    return b"\n" if word == EOS else f"{word} ".encode()


def count_words(lines: Iterable[str]) -> WordTokenizer:
    """Make the vocabulary of a text: `<eos>` and the words, most frequent first, ties in order of appearance.

    Args:
        lines: without line ends; each counts as one `<eos>`.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
        counts[EOS] += 1
    return WordTokenizer([word for word, _ in counts.most_common()])

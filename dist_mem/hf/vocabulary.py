"""The tokens of a folder in Hugging Face's layout, by id, compared with those of a tokenizer of ours.

Two tokenizers of the same size may name other tokens by the same ids, and weights are of ids. A folder has its tokens
in tokenizer.json, vocab.json or tokenizer.model; how they are spelled depends on the kind. Tokens without text, as BOS,
are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from dist_mem.config import ModelConfig
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.huggingface import IDS, WHOLE, of_alphabet, spelling_of
from dist_mem.data.tokenizers.sentencepiece import piece_bytes
from dist_mem.errors import UnusableError
from dist_mem.hf.folder import build_again
from dist_mem.runtime.file_schema import check, read_json
from dist_mem.runtime.files import read_regular

_AGAIN = ": copy the folder again"


def _vocab(_: str, value: Any) -> Iterator[str]:
    return IDS("vocab", value)


class Vocabulary(NamedTuple):
    """The tokens of a folder that have text."""

    path: Path  # of the file
    pieces: dict[int, bytes]  # id -> its text


def compare_tokens(model: ModelConfig, tokenizer: Tokenizer) -> str | None:
    """Compare the tokens of `model.pretrained` with those of the data.

    Returns:
        A remark if the folder has no tokenizer that is read here, so that nobody can know; else None.

    Raises:
        UnusableError: an id is another token in the folder, or its file is damaged.
    """
    folder = Path(model.pretrained or "")
    found = read_vocabulary(folder)
    if found is None:
        return (
            f"{folder} has no tokenizer.json, vocab.json or tokenizer.model to compare with: nobody can know whether "
            "the data has the tokens of its weights"
        )
    for token, ours in enumerate(tokenizer.pieces):
        theirs = found.pieces.get(token)
        if ours and theirs is not None and ours != theirs:
            raise UnusableError(
                f"model.pretrained: token {token} is {_printable_piece(theirs)} in {found.path}, but "
                f"{_printable_piece(ours)} in the tokenizer of data.path: {build_again(model)}"
            )
    return None


def _printable_piece(piece: bytes) -> str:
    return ascii(piece.decode("utf-8", "backslashreplace"))


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the tokens of a folder; None if it has none that are read here.

    Raises:
        UnusableError: a file is damaged.
    """
    for name, read in (
        ("tokenizer.json", _read_fast),
        ("vocab.json", _byte_pairs),
        ("tokenizer.model", _sentencepiece),
    ):
        if (folder / name).is_file() and (pieces := read(folder / name)) is not None:
            return Vocabulary(folder / name, pieces)
    return None


def _read_fast(path: Path) -> dict[int, bytes] | None:
    """Read a file of the library `tokenizers`."""
    content = read_json(path, UnusableError, _AGAIN)
    check(content, WHOLE, path, UnusableError, _AGAIN)
    model = content["model"]
    ids = model.get("vocab")
    if isinstance(ids, list):  # of a unigram model: pairs of a token and its score
        ids = {pair[0]: place for place, pair in enumerate(ids) if isinstance(pair, list) and _is_scored(pair)}
    check(ids, _vocab, path, UnusableError, _AGAIN)
    spell = spelling_of(content)
    added = {token["id"] for token in content.get("added_tokens", ())}
    return {token: spell(name) for name, token in ids.items() if token not in added}


def _is_scored(pair: list[Any]) -> bool:
    return len(pair) == 2 and isinstance(pair[0], str)


def _byte_pairs(path: Path) -> dict[int, bytes]:
    ids = read_json(path, UnusableError, _AGAIN)
    check(ids, _vocab, path, UnusableError, _AGAIN)
    spell = of_alphabet()
    return {token: spell(name) for name, token in ids.items()}


def _sentencepiece(path: Path) -> dict[int, bytes] | None:
    """Read a SentencePiece model; other programs have files of this name too, as tiktoken."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=read_regular(path))
    except RuntimeError:
        return None
    return {token: piece for token in range(processor.vocab_size()) if (piece := piece_bytes(processor, token))}

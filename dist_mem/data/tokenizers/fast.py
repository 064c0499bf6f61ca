"""Convert a tokenizer into one of Hugging Face's `tokenizers`, for AutoTokenizer; the ids of a text are the same.

Bytes and GPT-2's byte pairs keep their alphabet, words their list. SentencePiece's BPE becomes byte pairs: every cut of
a piece into two other pieces is a merge, ranked by the piece's score. A space is written as a space and not as U+2581,
so that a U+2581 of the text falls back to its bytes, as in sentencepiece.py. A unigram model is refused: the library
sums its scores with another rounding, and matches the names of byte pieces (`<0x41>`) in a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, BytePairTokenizer, byte_alphabet
from dist_mem.data.tokenizers.sentencepiece import SPACE, SentencePieceTokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import EOS, UNKNOWN, WordTokenizer

proto: Any = sentencepiece_model_pb2  # made at run time, without types
_BOS = "<s>"
_WHITE = r"[\s\x1c-\x1f]+"  # what str.split() cuts at; \s lacks four of its separators
_CHECKED_PIECES = 2_000  # of a random text that both tokenizers encode


def bos_token(tokenizer: Tokenizer) -> str:
    """Return the name of BOS, which no word of the vocabulary has."""
    if isinstance(tokenizer, BytePairTokenizer):
        return END_OF_TEXT
    name, taken = _BOS, tokenizer.ids.keys() if isinstance(tokenizer, WordTokenizer) else ()
    while name in taken:
        name = f"<{name}>"
    return name


def fast_tokenizer(tokenizer: Tokenizer, *, adds_bos: bool) -> tokenizers.Tokenizer:
    """Return the converted tokenizer; special tokens in a text are plain text only if the caller splits them.

    Args:
        adds_bos: BOS comes before every text.

    Raises:
        ValueError: the conversion would give other ids.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        converted = _from_sentencepiece(tokenizer)
    elif isinstance(tokenizer, WordTokenizer):
        converted = _from_words(tokenizer)
    elif isinstance(tokenizer, BytePairTokenizer):
        converted = _from_alphabet(tokenizers.Tokenizer.from_str(tokenizer.processor.to_str()), use_regex=True)
    elif isinstance(tokenizer, BytesTokenizer):
        vocabulary = byte_alphabet()
        converted = _from_alphabet(tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[])), use_regex=False)
    else:
        raise ValueError(f"a tokenizer of kind {tokenizer.kind} has no fast form")
    name = bos_token(tokenizer)
    converted.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    assert converted.token_to_id(name) == tokenizer.bos_id, "else BOS would be another id"
    _check(tokenizer, converted)
    if adds_bos:
        converted.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, tokenizer.bos_id)]
        )
    return converted


def _from_alphabet(converted: tokenizers.Tokenizer, *, use_regex: bool) -> tokenizers.Tokenizer:
    converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    converted.decoder = decoders.ByteLevel()
    return converted


def _from_words(tokenizer: WordTokenizer) -> tokenizers.Tokenizer:
    # without <unk> in the vocabulary, an unknown word is an error there too
    converted = tokenizers.Tokenizer(models.WordLevel(vocab=tokenizer.ids, unk_token=UNKNOWN))
    if EOS in tokenizer.ids:
        converted.normalizer = normalizers.Replace("\n", f" {EOS} ")
    converted.pre_tokenizer = pre_tokenizers.Split(Regex(_WHITE), "removed")
    spaced, line_end = decoders.Replace(Regex("$"), " "), decoders.Replace(Regex(f"^{EOS} $"), "\n")
    converted.decoder = decoders.Sequence([spaced, line_end, decoders.Fuse()])
    return converted


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    model = proto.ModelProto()
    model.ParseFromString(tokenizer.model)
    if model.trainer_spec.model_type != proto.TrainerSpec.BPE:
        raise ValueError("a SentencePiece model that is not BPE gives other ids as a fast tokenizer")
    piece = proto.ModelProto.SentencePiece
    names = [entry.piece.replace(SPACE, " ") for entry in model.pieces]
    ids = {name: token for token, name in enumerate(names)}
    plain = {name: entry.score for name, entry in zip(names, model.pieces, strict=True) if entry.type == piece.NORMAL}
    (unknown,) = (name for name, entry in zip(names, model.pieces, strict=True) if entry.type == piece.UNKNOWN)
    whole = [name for name, entry in zip(names, model.pieces, strict=True) if entry.type == piece.USER_DEFINED]
    merges = [pair for _, pair in sorted(_merges(plain), key=lambda merge: merge[0])]
    converted = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    cuts = [pre_tokenizers.Split(name, "isolated") for name in whole]
    converted.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    converted.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return converted


def _merges(scores: dict[str, float]) -> Iterator[tuple[float, tuple[str, str]]]:
    """Yield every cut of a piece into two pieces, with its rank: the better the piece's score, the lower."""
    for name, score in scores.items():
        for place in range(1, len(name)):
            if name[:place] in scores and name[place:] in scores:
                yield -score, (name[:place], name[place:])


def _check(tokenizer: Tokenizer, converted: tokenizers.Tokenizer) -> None:
    """Raise ValueError if a text of random pieces gives other ids."""
    text = tokenizer.decode(np.random.default_rng(0).integers(tokenizer.vocab_size, size=_CHECKED_PIECES))
    converted.encode_special_tokens = True
    if converted.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
        raise ValueError(f"this tokenizer of kind {tokenizer.kind} gives other ids as a fast tokenizer")

"""A small tokenizer of every kind, trained on a text."""

from collections.abc import Callable

import tokenizers

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer
from dist_mem.data.tokenizers.sentencepiece import train_pieces
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import count_words


def word_pieces(text: str) -> Tokenizer:
    """As BERT: in lower case, without white space, and a Chinese letter is a word."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    made.train_from_iterator([text], trainer)
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str()}, bos_id=1, vocab_size=100)


MAKE: dict[str, Callable[[str], Tokenizer]] = {
    "bytes": lambda text: BytesTokenizer(),
    "words": lambda text: count_words(text.splitlines()),
    "gpt2": lambda text: train_byte_pairs([text], vocab_size=280),
    "sentencepiece": lambda text: train_pieces(text.splitlines(), vocab_size=300),
    "huggingface": word_pieces,
}

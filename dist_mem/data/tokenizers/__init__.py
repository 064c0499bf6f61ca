"""Tokenizers: bytes, words, byte pairs and SentencePiece pieces."""

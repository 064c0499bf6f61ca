"""Builders: documents to tokenized shards, in parallel and restartable."""

"""Checkpoints: content, writing, choice, verification and deletion."""

"""Replies in document-grounded dialogues (Martins et al. 2022, sec. 4.3) and their metrics."""

"""Dialogues grounded in a document (Martins et al. 2022, sec. 4.3): replies written, and what they are worth."""

"""Reproduce the papers' tables and figures: train and evaluate every row, then write the table."""

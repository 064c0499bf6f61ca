"""Evaluation: load a trained model, score documents, compare and plot runs, export models."""

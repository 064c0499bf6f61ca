"""Checkpoints: what is saved of a run, how it comes to be on disk, and how a run goes on from it."""

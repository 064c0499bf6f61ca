"""Checkpoints: what they contain, how they are written, chosen, verified and deleted."""

"""Data behind URLs: download, cache, and copies on a node's own disk."""

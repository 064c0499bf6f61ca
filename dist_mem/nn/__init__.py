"""Layers without memory: attention, feed-forward, embeddings, softmax, and their operation counts."""

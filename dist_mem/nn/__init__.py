"""Layers without memory: attention, feed-forward, embeddings, softmax."""

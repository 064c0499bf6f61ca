"""The Python API: load a model, score and generate text with memory, look into it, train (docs/start/python.md)."""

"""Writing on where a text ends: prompts read into memory, tokens drawn one by one, texts compared."""

"""Text generation with memory: read prompts, sample tokens, compare texts."""

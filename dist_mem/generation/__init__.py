"""Text generation with memory: reading prompts, sampling tokens, comparing texts."""

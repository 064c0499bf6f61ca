"""GPT-2 weights by Hugging Face's names, and folders in Hugging Face's layout; see docs/howto/gpt2.md."""

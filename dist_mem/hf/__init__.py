"""Published models by Hugging Face's names, and folders in its layout; see docs/howto/gpt2.md, docs/howto/llama.md."""

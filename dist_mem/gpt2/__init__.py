"""What a model is made of with `model.kind: gpt2`, and folders in Hugging Face's layout; see docs/gpt2.md."""

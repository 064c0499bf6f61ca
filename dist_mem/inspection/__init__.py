"""What a trained model's memory does with one text: where it looks, what it gains, what a passage is worth."""

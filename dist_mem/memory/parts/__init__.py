"""What memories are made of."""

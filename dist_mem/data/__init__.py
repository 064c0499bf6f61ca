"""From shards to batches: the plan, lanes and documents; builders, remote data and tokenizers."""

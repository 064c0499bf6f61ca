"""What a job needs before it runs: memory, time of a step, checkpoints; and settings that fit a cluster."""

"""What a run read at a step, and the step computed again: `dist-mem batch`, `dist-mem recompute`."""

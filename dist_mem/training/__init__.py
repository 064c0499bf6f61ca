"""Training: open or resume a run, make steps, evaluate and save between steps, stop."""

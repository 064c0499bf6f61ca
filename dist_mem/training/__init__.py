"""Training: open or resume a run, make one step, evaluate and save between steps, stop."""

"""Are this machine and these ranks fit to train? `dist-mem doctor`, the same at the start of a job, and a drill."""

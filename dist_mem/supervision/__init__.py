"""The life of a job: its lease on the run directory, the watchdog, rendezvous of ranks, and slow ranks."""

"""Processes, files and signals: environment variables, ranks, safe writes, the lease and the watchdog."""

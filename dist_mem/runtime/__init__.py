"""Processes, files and signals: environment variables, ranks, devices, locks and safe writes."""

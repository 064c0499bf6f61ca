"""Checks of nodes, network, disks and configuration before a job starts."""

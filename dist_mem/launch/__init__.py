"""Jobs on a Slurm cluster: the script, and how it is handed in."""

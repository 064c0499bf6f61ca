"""Jobs on a Slurm cluster: the batch script and its submission."""

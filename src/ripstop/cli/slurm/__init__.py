"""`ripstop slurm`: from a command line to a job script for sbatch."""

"""What starts the agents of a job on a cluster: Slurm, MPI or AWS Batch.  Their variables, and the user's key."""

"""The programs that start agents on a cluster (Slurm, MPI, AWS Batch): their variables, and the user's key."""

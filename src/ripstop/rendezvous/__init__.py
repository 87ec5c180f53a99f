"""Who is in the job: the coordinator's machine, its drivers, and the agents' links to it."""

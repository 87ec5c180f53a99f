"""The HTTP API of a running job, on the coordinator's port and on a local Unix socket, and how operators find a job."""

"""The HTTP API of a running job (server and client), its local Unix socket, and the registry of jobs."""

"""The HTTP API of a running job (server and client), its local Unix socket, the files of local jobs, and probes."""

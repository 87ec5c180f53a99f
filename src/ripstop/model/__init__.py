"""The data types of a job (configuration, nodes, rounds, events, failures, status), and the parsers of settings."""

"""The vocabulary of a job: configuration, nodes and rounds, events, failures, status.  Pure data; no IO."""

"""Outputs of events: event files, the journal, log lines, metrics, goodput, traces, and torch's event handlers."""

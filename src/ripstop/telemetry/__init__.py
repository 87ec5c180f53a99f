"""What happened, for people and tools.

Journal, event files, log lines, metrics, goodput, traces, torch's event handlers.
"""

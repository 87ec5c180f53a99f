"""What happened, told truthfully: failures, reports, log lines."""

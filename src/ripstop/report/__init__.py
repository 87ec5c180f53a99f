"""The report of a job, from its events alone: what happened, why, and what it cost; as HTML and as JSON."""

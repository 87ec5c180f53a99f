"""`ripstop top`: a job at a terminal.  `job_view` derives, `screen` draws, both pure; `terminal` does the rest."""

"""Workers' output: the log directory, the copier to the console, reading and following log files, log plugins."""

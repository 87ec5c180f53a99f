"""The subcommands of `ripstop`."""

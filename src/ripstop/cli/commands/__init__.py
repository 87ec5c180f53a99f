"""The subcommands of `ripstop`: one module each."""

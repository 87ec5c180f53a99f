"""From command-line flags and environment variables to the parts of the configuration."""

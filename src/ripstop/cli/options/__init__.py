"""From command-line flags and environment variables to the parts of the configuration, one module a group of flags."""

"""The supervisor of one node: `machine` decides, `driver` and `round_runner` execute."""

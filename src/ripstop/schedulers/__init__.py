"""ripstop under somebody else's scheduler."""

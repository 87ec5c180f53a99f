"""ripstop keeps distributed PyTorch training alive: it launches, supervises, heals and resizes jobs."""

__version__ = "0.1.0"

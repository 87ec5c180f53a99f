"""ripstop keeps distributed PyTorch training alive: it launches, supervises, heals and resizes jobs."""

TYPE_CHECKING = False  # without the import of typing, which slows every start
if TYPE_CHECKING:
    from ripstop import train
    from ripstop.workers.error_file import record

__version__ = "0.1.0"
__all__ = ["__version__", "record", "train"]


def __getattr__(name: str) -> object:
    """Import a public name at its first use: the agent needs none of them and starts faster without."""
    if name == "record":
        from ripstop.workers.error_file import record

        return record
    if name == "train":
        from importlib import import_module

        return import_module("ripstop.train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

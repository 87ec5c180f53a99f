"""Runs a torch event handler in its own process: handlers are user code, and may import torch.

Run as `python -P torch_handler_process.py FD NAME`; each message on the socket is one event.  The handler is a
`logging.Handler`: one of torch's own (`null`, `console`, `dynamic_rendezvous`), or the object of an entry point of the
group `torchrun.event_handlers`, which is a handler or a function that returns one.  The first exception that it raises
is logged; it gets later events all the same.  This file is executed, not imported, and imports nothing of ripstop.
"""

import logging
import socket
import sys
from typing import Any

GROUP = "torchrun.event_handlers"
MAX_EVENT_BYTES = 1 << 20
NAMES = ("null", "console", "dynamic_rendezvous")  # torch's own; the last one is a null handler, too


def find_torch_handler_in_process(name: str) -> logging.Handler:
    """Raises LookupError for an unknown name, TypeError if the object is not a handler."""
    if name in NAMES:
        return logging.StreamHandler() if name == "console" else logging.NullHandler()
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        found: Any = point.load()
        made = found if isinstance(found, logging.Handler) else found()
        if not isinstance(made, logging.Handler):
            raise TypeError(f"{point.value} gives a {type(made).__name__}, and not a logging.Handler")
        return made
    raise LookupError(f"{name}: there is no such event handler, and no entry point {GROUP} of this name")


def main(fd: int, name: str) -> int:
    logging.raiseExceptions = False  # no traceback for each event that cannot be written
    try:
        handler = find_torch_handler_in_process(name)
    except Exception as error:
        return _log_handler_process_failure(name, error)
    logger = logging.Logger(f"torchelastic-events-{name}")
    logger.addHandler(handler)
    failure_logged = False
    with socket.socket(fileno=fd) as channel:
        while event := channel.recv(MAX_EVENT_BYTES):
            try:
                logger.info(event.decode("utf-8", "replace"))
            except Exception as error:
                failure_logged = failure_logged or bool(_log_handler_process_failure(name, error))
    logging.shutdown()
    return 0


def _log_handler_process_failure(name: str, error: Exception) -> int:
    print(f"ripstop: the event handler {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the agent, also while the handler blocks
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))

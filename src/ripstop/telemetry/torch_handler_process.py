"""Hands events to a handler of torch's kind, in a process of its own: handlers are the users', and may import torch.

Run as `python -P handle_events.py FD NAME`, with a socket on which events come, a message each.  The handler is a
`logging.Handler`: one of torch's names (`null`, `console`, `dynamic_rendezvous`), or what an entry point of the group
`torchrun.event_handlers` gives, which is a handler or something that makes one.  What it raises is said once; it is
given the next event all the same.  Executed with nothing of ours around it, so it imports nothing of ours.
"""

import logging
import socket
import sys
from typing import Any

GROUP = "torchrun.event_handlers"
LONGEST = 1 << 20  # bytes of an event
NAMES = ("null", "console", "dynamic_rendezvous")  # torch's own; the last is null, too


def find_handler(name: str) -> logging.Handler:
    """LookupError where nobody has this name; TypeError where it is no handler's."""
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
    logging.raiseExceptions = False  # what a handler of logging's own cannot write is not worth a traceback an event
    try:
        handler = find_handler(name)
    except Exception as error:
        return _broken(name, error)
    logger = logging.Logger(f"torchelastic-events-{name}")
    logger.addHandler(handler)
    said = False
    with socket.socket(fileno=fd) as channel:
        while event := channel.recv(LONGEST):
            try:
                logger.info(event.decode("utf-8", "replace"))
            except Exception as error:
                said = said or bool(_broken(name, error))
    logging.shutdown()
    return 0


def _broken(name: str, error: Exception) -> int:
    print(f"ripstop: the event handler {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the agent, also while the handler blocks
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))

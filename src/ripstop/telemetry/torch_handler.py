"""`--event-log-handler`: a handler of torch's kind hears of what happens to this node's workers.

The handler is in a process of its own (`telemetry/torch_handler_process.py`), and a socket of limited size lies
between: one that
raises, blocks or crashes, or imports torch, costs the agent nothing.  What it misses by that is said once.
"""

import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from ripstop.telemetry import torch_handler_process
from ripstop.workers.processes import Children, cannot_start

log = logging.getLogger("ripstop.workers")

GOODBYE = 2.0  # seconds for what the handler has not heard yet


class EventHandler:
    """The handler's process; it lasts until `close`."""

    def __init__(self, name: str, environ: Mapping[str, str], children: Children) -> None:
        self._name = name
        self._children = children
        self._complained = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-P", torch_handler_process.__file__, str(theirs.fileno()), name]
            try:
                self._pid = os.posix_spawn(sys.executable, argv, dict(environ), setsid=True)
            except OSError as error:
                self._socket.close()
                raise cannot_start(f"the event handler {name}", error) from error
        children.claim(self._pid)

    def put(self, line: str) -> None:
        """Have the handler told, soon; does not wait."""
        try:
            self._socket.send(line.encode("utf-8", "backslashreplace"))
        except BlockingIOError:
            self._complain("does not keep up, and misses events")
        except OSError as error:
            self._complain(f"hears no more: {error.strerror}")

    def close(self) -> None:
        """Waits, briefly, until it has heard all; then it is gone."""
        self._socket.close()
        with suppress(OSError):
            pidfd = os.pidfd_open(self._pid)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(GOODBYE * 1000):
                self._complain(f"was not done {GOODBYE:g} s after the end")
            os.close(pidfd)
        os.kill(self._pid, signal.SIGKILL)
        self._children.reap(self._pid)

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("the event handler %s %s; the job goes on", self._name, what)

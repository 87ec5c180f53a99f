"""`--event-log-handler`: passes the events of this node's workers to a torch event handler.

The handler runs in its own process (`torch_handler_process.py`), connected by a socket with a bounded buffer.  So a
handler that raises, blocks, crashes or imports torch does not affect the agent.  Lost events are logged once.
"""

import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from ripstop.model.config import RunConfig
from ripstop.model.events import EventRecord, Sink
from ripstop.telemetry import torch_handler_process
from ripstop.telemetry.torch_events import TorchEvents
from ripstop.workers.processes import Children, process_start_error

log = logging.getLogger("ripstop.workers")

CLOSE_TIMEOUT_S = 2.0  # for events that the handler has not processed yet


class EventHandler:
    """The handler's process; it runs until `close`."""

    def __init__(self, name: str, environ: Mapping[str, str], children: Children) -> None:
        self._name = name
        self._children = children
        self._problem_logged = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-P", torch_handler_process.__file__, str(theirs.fileno()), name]
            try:
                self._pid = os.posix_spawn(sys.executable, argv, dict(environ), setsid=True)
            except OSError as error:
                self._socket.close()
                raise process_start_error(f"the event handler {name}", error) from error
        children.claim(self._pid)

    def put(self, line: str) -> None:
        """Send an event to the handler; does not wait."""
        try:
            self._socket.send(line.encode("utf-8", "backslashreplace"))
        except BlockingIOError:
            self._log_problem("is too slow and loses events")
        except OSError as error:
            self._log_problem(f"cannot be reached: {error.strerror}")

    def close(self) -> None:
        """Wait briefly until the handler has processed all events, then kill it."""
        self._socket.close()
        with suppress(OSError):
            pidfd = os.pidfd_open(self._pid)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(CLOSE_TIMEOUT_S * 1000):
                self._log_problem(f"had not finished {CLOSE_TIMEOUT_S:g} s after the end")
            os.close(pidfd)
        os.kill(self._pid, signal.SIGKILL)
        self._children.reap(self._pid)

    def _log_problem(self, what: str) -> None:
        if not self._problem_logged:
            self._problem_logged = True
            log.warning("the event handler %s %s; the job continues", self._name, what)


def torch_handler_sink(config: RunConfig, program: str, put: Callable[[str], None]) -> Sink:
    """A sink that passes this node's events to `put` in the format of torch's agent."""
    events = TorchEvents(
        run_id=config.run_id, role=config.role, backend=config.backend.value, host=socket.gethostname(), program=program
    )

    def sink(record: EventRecord) -> None:
        for text in events.convert(record):
            put(text)

    return sink

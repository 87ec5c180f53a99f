"""Polls for the notice that this machine will be preempted (`--preemption-notice`): a file, or the reply of a URL.

Clouds offer no notification.  Rules: (1) a file that exists is a notice; (2) an HTTP reply 200 with a text other than
FALSE or NONE is a notice, if the text is not empty (Google's metadata server replies FALSE before it); (3) anything
else is not, and the first error is logged; (4) there is one request at a time, in a thread of its own; (5) a request
ends after `REQUEST_TIMEOUT_S`, also if the reply is slow or endless.
"""

import asyncio
import http.client
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from ripstop.system.blocking_calls import ExclusiveCall

log = logging.getLogger("ripstop.agent")

INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 1.0
MAX_BODY_BYTES = 4096
NO_NOTICE = ("", "false", "none")  # texts of answers


async def wait_for_notice(source: str, on_notice: Callable[[str], None]) -> None:
    """Report the notice once."""
    look = ExclusiveCall(partial(has_notice, source), initial=False, what=f"--preemption-notice={source}")
    has_warned = False
    while not (found := await look.call(3 * REQUEST_TIMEOUT_S)):
        if found is None and not has_warned:
            log.warning("--preemption-notice=%s: a request hangs; a notice is not seen until it ends", source)
            has_warned = True
        await asyncio.sleep(INTERVAL_S)
    on_notice(source)


def has_notice(source: str) -> bool:
    """Rules 1 and 2.  OSError, HTTPException: there is no valid reply."""
    if not source.startswith("http://"):
        return os.path.lexists(source)
    url = urlsplit(source)
    connection = http.client.HTTPConnection(str(url.hostname), url.port or 80, timeout=REQUEST_TIMEOUT_S)
    connection.connect()
    end = time.monotonic() + REQUEST_TIMEOUT_S
    deadline = threading.Timer(REQUEST_TIMEOUT_S, _abort_preemption_notice_request, (connection.sock,))  # rule 5
    deadline.daemon = True
    deadline.start()
    try:
        path = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return False
        text = answer.read(MAX_BODY_BYTES).decode("utf-8", "replace").strip()
        if time.monotonic() >= end:
            raise TimeoutError(f"the reply is not complete after {REQUEST_TIMEOUT_S:g} s")
        return text.lower() not in NO_NOTICE
    finally:
        deadline.cancel()
        connection.close()


def _abort_preemption_notice_request(connection: socket.socket) -> None:
    """A thread that reads from it gets an error, or the end of the reply."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

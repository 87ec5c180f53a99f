"""Polls for the notice that this machine will be preempted (`--preemption-notice`): a file, or the reply of a URL.

Clouds offer no notification.  Rules: (1) a file that exists is a notice; (2) an HTTP reply 200 with a text other than
FALSE is a notice (Google's metadata server replies FALSE before it); (3) anything else is not, and the first error is
logged; (4) a request is short and bounded, and no other thread of the agent waits for it.
"""

import asyncio
import http.client
import logging
import os
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from ripstop.system.blocking_calls import run_in_daemon_thread

log = logging.getLogger("ripstop.agent")

INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 1.0
MAX_BODY_BYTES = 4096
NO_NOTICE = ("", "false", "none")  # texts of answers


async def wait_for_notice(source: str, on_notice: Callable[[str], None]) -> None:
    """Report the notice once."""
    has_failed = False
    while True:
        try:
            if await run_in_daemon_thread(partial(has_notice, source), 2 * REQUEST_TIMEOUT_S):
                on_notice(source)
                return
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            if not has_failed:
                log.warning("--preemption-notice=%s cannot be read; retrying (logged once): %r", source, error)
            has_failed = True
        await asyncio.sleep(INTERVAL_S)


def has_notice(source: str) -> bool:
    """Rules 1 and 2."""
    if not source.startswith("http://"):
        return os.path.lexists(source)
    url = urlsplit(source)
    connection = http.client.HTTPConnection(str(url.hostname), url.port or 80, timeout=REQUEST_TIMEOUT_S)
    try:
        path = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return False
        return answer.read(MAX_BODY_BYTES).decode("utf-8", "replace").strip().lower() not in NO_NOTICE
    finally:
        connection.close()

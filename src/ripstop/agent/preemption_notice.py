"""Polls for the notice that this machine will be preempted (`--preemption-notice`): a file, or the reply of a URL.

Clouds offer no notification.  Rules: (1) a file that exists is a notice; (2) an HTTP reply 200 with a text other than
FALSE is a notice (Google's metadata server replies FALSE before it); (3) anything else is not, and the first error is
logged; (4) there is one request at a time, in a thread of its own: one that hangs is not repeated.
"""

import asyncio
import http.client
import os
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from ripstop.system.blocking_calls import ExclusiveCall

INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 1.0
MAX_BODY_BYTES = 4096
NO_NOTICE = ("", "false", "none")  # texts of answers


async def wait_for_notice(source: str, on_notice: Callable[[str], None]) -> None:
    """Report the notice once."""
    look = ExclusiveCall(partial(_look, source), initial=False)
    while True:
        if await look.call(2 * REQUEST_TIMEOUT_S):
            on_notice(source)
            return
        await asyncio.sleep(INTERVAL_S)


def _look(source: str) -> bool:
    try:
        return has_notice(source)
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"--preemption-notice={source} cannot be read; retrying: {error!r}") from error


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

"""Answers to probes, over HTTP on a port of its own: is this agent alive, is it ready?

`/livez` is 200 for as long as the agent's event loop turns: that it answers is the proof.  `/readyz` is 200 while the
agent is of use to its job, else 503 and the reason.  Whoever can reach the port may ask and learns no more than that; a
request has a bounded size and time, and there are never more than `MOST` of them.
"""

import asyncio
import socket
from collections.abc import Callable

from ripstop.errors import UsageError

LONGEST = 8192  # bytes of a request
PATIENCE = 5.0  # seconds for it to come
MOST = 32  # at a time
ALIVE = ("/livez", "/healthz", "/live", "/")  # the first is ours, the others are what people are used to
READY = ("/readyz", "/ready")
WORDS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def listen(name: str, host: str | None, port: int) -> socket.socket:
    """At this port, of this address or of all; `name` is what the user calls the port."""
    try:
        if host is None:
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        raise UsageError(
            f"{name}={port}: cannot be listened on here ({error.strerror}); choose a port that is free"
        ) from error


async def serve(listening: socket.socket, unready: Callable[[], str]) -> asyncio.Server:
    """Answer from now on; `unready` says why this agent is of no use, "" if it is."""
    busy = 0

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy
        busy += 1
        try:
            if busy <= MOST:
                async with asyncio.timeout(PATIENCE):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(answer(head, unready))
                    await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            pass
        finally:
            busy -= 1
            writer.close()

    return await asyncio.start_server(converse, sock=listening, limit=LONGEST)


def answer(head: bytes, unready: Callable[[], str]) -> bytes:
    """The response to a request."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace")
    if path not in (*ALIVE, *READY):
        status, text = 404, f"there are {ALIVE[0]} and {READY[0]}"
    elif method not in (b"GET", b"HEAD"):
        status, text = 405, "only GET makes sense here"
    elif path in READY and (why := unready()):
        status, text = 503, why
    else:
        status, text = 200, "ok"
    body = f"{text}\n".encode()
    head = (
        f"HTTP/1.1 {status} {WORDS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if method == b"HEAD" else head + body

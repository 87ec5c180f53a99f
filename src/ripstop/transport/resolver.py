"""A DNS resolver for aiohttp that never delays the end of the process.

A lookup cannot be interrupted, and may take as long as the system's resolver allows.  In asyncio's thread pool it would
delay the end of the process.  Here it runs in a daemon thread: the caller may give up, and a late result is dropped.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult


class Resolver(AbstractResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[Any]] = loop.create_future()

        def look_up() -> None:
            found: list[Any] | OSError
            try:
                found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            except OSError as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_complete, result, found)

        threading.Thread(target=look_up, name="ripstop-resolve", daemon=True).start()
        return [
            ResolveResult(hostname=host, host=_numeric(address), port=port, family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, address in await result
        ]

    async def close(self) -> None:
        pass


def _complete(result: asyncio.Future[list[Any]], found: list[Any] | OSError) -> None:
    if result.done():
        return  # the caller gave up
    if isinstance(found, OSError):
        result.set_exception(found)
    else:
        result.set_result(found)


def _numeric(address: tuple[Any, ...]) -> str:
    host, scope = str(address[0]), address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host

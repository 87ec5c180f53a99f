"""Names to addresses, in a thread that nobody waits for.

A look-up can hang for as long as the system's resolver likes, and cannot be interrupted.  In asyncio's own pool it
would hold up the end of the process; here whoever asked may give up, and the late answer goes nowhere.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult


class Resolver(AbstractResolver):
    """What aiohttp asks for addresses."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        def look_up() -> None:
            try:
                found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            except OSError as error:
                tell(_fail, error)
            else:
                tell(_succeed, found)

        def tell(how: Any, what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(how, answer, what)

        threading.Thread(target=look_up, name="ripstop-resolve", daemon=True).start()
        return [
            ResolveResult(hostname=host, host=_numeric(address), port=port, family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, address in await answer
        ]

    async def close(self) -> None:
        pass


def _succeed(answer: asyncio.Future[list[Any]], found: list[Any]) -> None:
    if not answer.done():
        answer.set_result(found)


def _fail(answer: asyncio.Future[list[Any]], error: OSError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _numeric(address: tuple[Any, ...]) -> str:
    host, scope = str(address[0]), address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host

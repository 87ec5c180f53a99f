"""A DNS resolver for aiohttp that never delays the end of the process.

A lookup cannot be interrupted, and may take as long as the system's resolver allows.  In asyncio's thread pool it would
delay the end of the process.  Here it runs in a daemon thread: the caller may give up, and a late result is dropped.
"""

import socket
from functools import partial
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from ripstop.system.blocking_calls import run_in_daemon_thread


class Resolver(AbstractResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        try:
            found = await run_in_daemon_thread(look_up, timeout=None)
        except UnicodeError as error:  # not a valid name; aiohttp handles only an OSError
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
        return [
            ResolveResult(hostname=host, host=_resolved_host(address), port=port, family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        pass


def _resolved_host(address: tuple[Any, ...]) -> str:
    host, scope = str(address[0]), address[3] if len(address) > 3 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host

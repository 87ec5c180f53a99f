"""The way to a job for its user on this machine: a socket that serves its API, and the file by which it is found.

Rules: (1) the socket is its user's and root's alone, by its directory, its mode and the kernel's word on who connects,
so no token is asked for; (2) until somebody connects it costs a listening socket and nothing else: what serves HTTP is
imported then, in a thread; (3) a job that cannot have one is run without it, and its log says so; (4) what somebody has
removed, as the system does when a user logs out, is made anew; nobody tells, so it is looked for.
"""

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ripstop.api.job_interface import JobInterface, RequestRefused
from ripstop.api.registry import JobRecord, Registration, socket_address
from ripstop.model.config import Tls
from ripstop.model.errors import RipstopError
from ripstop.system.run_directory import HeldDirectory

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("ripstop.telemetry")

BACKLOG = 16
LOOK = 5.0  # seconds between two looks whether the socket and its file are there
GOODBYE = 1.0  # seconds for what is being answered
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class JobSocket:
    """One process's way to its job.  `job` is there while the coordinator is in this process."""

    def __init__(self, environ: Mapping[str, str], run_id: str, node: str, token: str, tls: Tls | None) -> None:
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        certificates = tls or Tls()
        self._sign = JobRecord(
            run_id,
            node,
            os.getpid(),
            time.time(),
            tls=tls is not None,
            tls_ca=_path(certificates.ca),
            tls_cert=_path(certificates.cert),
            tls_key=_path(certificates.key),
        )
        self._token = token
        self._environ = environ
        self._timer: asyncio.TimerHandle | None = None
        self._said = False
        self._listening: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        self._serving: asyncio.Task[None] | None = None
        self._held: HeldDirectory | None = None
        self._registration: Registration | None = None
        self.job: JobInterface | None = None
        try:
            self._held = HeldDirectory(environ)
            self._registration = Registration(self._held.path, self._name)
        except (RipstopError, OSError) as error:
            self._give_up(str(error))

    def lead(self, job: JobInterface, endpoint: str = "") -> None:
        """The job's coordinator is in this process; over the network it is at the endpoint."""
        self.job = job
        if self._held is None:
            return
        try:
            if self._listening is None:
                self._listen(self._held.path / f"{self._name}.sock")
        except OSError as error:
            self._give_up(f"no socket in {self._held.path}: {error.strerror or error}")
            return
        self._say(socket=f"{self._name}.sock", endpoint=endpoint, token="")

    def follow(self, endpoint: str) -> None:
        """It is elsewhere, there."""
        self.job = None
        self._say(socket="", endpoint=endpoint, token=self._token)

    async def close(self) -> None:
        """Nobody finds the job any more; what is being answered is answered, briefly."""
        if self._timer is not None:
            self._timer.cancel()
        if self._registration is not None:
            self._registration.close()
        if self._listening is not None and self._held is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            (self._held.path / f"{self._name}.sock").unlink(missing_ok=True)
        if self._serving is not None:
            await asyncio.wait([self._serving])
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listening is not None:
            self._listening.close()
        if self._held is not None:
            self._held.release()

    def _say(self, **changes: Any) -> None:
        if self._registration is None:
            return
        self._sign = replace(self._sign, **changes)
        try:
            self._registration.say(self._sign)
        except OSError as error:
            self._give_up(f"its file cannot be written: {error.strerror}")
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        """Rule 4."""
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)
        if self._held is None or self._registration is None or (self._serving and not self._serving.done()):
            return
        names = [f"{self._name}.json", *([f"{self._name}.sock"] if self._listening else [])]
        if all(os.path.lexists(self._held.path / name) for name in names):
            return
        try:
            self._make_anew(self._held, self._registration)
        except (RipstopError, OSError) as error:
            if not self._said:
                log.warning("%s was removed: the job cannot be steered from this machine: %s", self._held.path, error)
            self._said = True
        else:
            self._said = False
            log.warning("what was in %s was removed, and is made anew", self._held.path)

    def _make_anew(self, held: HeldDirectory, registration: Registration) -> None:
        self._held = HeldDirectory(self._environ)
        held.release()
        registration.close()
        if self._listening is not None:
            self._listen_anew(self._listening, self._held.path / f"{self._name}.sock")
        self._registration = Registration(self._held.path, self._name)
        self._registration.say(self._sign)

    def _listen_anew(self, old: socket.socket, path: Path) -> None:
        path.unlink(missing_ok=True)
        asyncio.get_running_loop().remove_reader(old)
        self._listen(path)
        if self._runner is None:
            old.close()  # else whoever serves it closes it

    def _give_up(self, why: str) -> None:
        log.warning("the job cannot be steered from this machine: %s", why)
        self._registration = None

    def _listen(self, path: Path) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            with socket_address(path) as address:
                listening.bind(address)
            path.chmod(0o600)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._somebody_comes)

    def _somebody_comes(self) -> None:
        assert self._listening is not None
        asyncio.get_running_loop().remove_reader(self._listening)
        self._serving = asyncio.create_task(self._serve(self._listening), name="ripstop-api")

    async def _serve(self, listening: socket.socket) -> None:
        """Rule 2; a defect here is this socket's end, not the job's."""
        try:
            await asyncio.to_thread(_import_api)
            from aiohttp import web

            from ripstop.api.http_api import Api, application

            if self._runner is None:
                app = application(Api(lambda: self.job, admit))
                runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=GOODBYE)
                await runner.setup()
                self._runner = runner
            await web.SockSite(self._runner, listening).start()
        except Exception:
            log.exception("the job cannot be steered from this machine")


def admit(request: "web.Request") -> str:
    """Rule 1."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        raise RequestRefused(401, "this connection is gone")
    if not hasattr(socket, "SO_PEERCRED"):
        return "this user"
    _, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid not in (0, os.getuid()):
        raise RequestRefused(403, f"the job is user {os.getuid()}'s, and user {uid} may not steer it; ask as that user")
    return f"user {uid}"  # its name may be in a directory service, and nobody here waits for one


def _import_api() -> None:
    import ripstop.api.http_api  # noqa: F401


def _path(path: Path | None) -> str:
    return str(path.absolute()) if path else ""

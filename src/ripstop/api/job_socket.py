"""Local access to a job: a Unix socket that serves its API, and the file by which commands find it.

Rules: (1) only the job's user and root can use the socket, by its directory, its mode and the kernel's peer
credentials, so there is no token; (2) until the first connection it costs a listening socket: the HTTP code is imported
then, in a thread; (3) a job runs without a socket if it cannot have one, and logs the reason; (4) a removed socket or
file is recreated, for example after the system has cleaned up at a logout; polled, because there is no notification.
"""

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ripstop.api.job_interface import JobInterface, RequestRefused
from ripstop.api.local_jobs import JobRecord, Registration
from ripstop.model.config import Tls
from ripstop.model.errors import RipstopError
from ripstop.system.socket_directory import HeldDirectory, socket_address

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("ripstop.telemetry")

BACKLOG = 16
CHECK_INTERVAL_S = 5.0  # between two checks whether the socket and its file exist
SHUTDOWN_TIMEOUT_S = 1.0  # for open requests
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class JobSocket:
    """Local access to the job of one process.  `job` is set while the coordinator is in this process."""

    def __init__(self, environ: Mapping[str, str], run_id: str, node: str, token: str, tls: Tls | None) -> None:
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        certificates = tls or Tls()
        self._record = JobRecord(
            run_id,
            node,
            os.getpid(),
            time.time(),
            tls=tls is not None,
            tls_ca=_job_socket_certificate_path(certificates.ca),
            tls_cert=_job_socket_certificate_path(certificates.cert),
            tls_key=_job_socket_certificate_path(certificates.key),
        )
        self._token = token
        self._environ = environ
        self._timer: asyncio.TimerHandle | None = None
        self._failure_logged = False
        self._listener: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        self._serve_task: asyncio.Task[None] | None = None
        self._directory: HeldDirectory | None = None
        self._registration: Registration | None = None
        self.job: JobInterface | None = None
        try:
            self._directory = HeldDirectory(environ)
            self._registration = Registration(self._directory.path, self._name)
        except (RipstopError, OSError) as error:
            self._give_up(str(error))

    def lead(self, job: JobInterface, endpoint: str = "") -> None:
        """Serve the API: the coordinator is in this process, and at this endpoint over the network."""
        self.job = job
        if self._directory is None:
            return
        try:
            if self._listener is None:
                self._listen(self._directory.path / f"{self._name}.sock")
        except OSError as error:
            self._give_up(f"no socket in {self._directory.path}: {error.strerror or error}")
            return
        self._publish(socket=f"{self._name}.sock", endpoint=endpoint, token="")

    def follow(self, endpoint: str) -> None:
        """Publish the endpoint of a coordinator in another process."""
        self.job = None
        self._publish(socket="", endpoint=endpoint, token=self._token)

    async def close(self) -> None:
        """Remove the file and the socket; open requests get `SHUTDOWN_TIMEOUT_S`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._registration is not None:
            self._registration.close()
        if self._listener is not None and self._directory is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            (self._directory.path / f"{self._name}.sock").unlink(missing_ok=True)
        if self._serve_task is not None:
            await asyncio.wait([self._serve_task])
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()
        if self._directory is not None:
            self._directory.release()

    def _publish(self, **changes: Any) -> None:
        if self._registration is None:
            return
        self._record = replace(self._record, **changes)
        try:
            self._registration.write(self._record)
        except OSError as error:
            self._give_up(f"cannot write its file: {error.strerror}")
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_files)

    def _check_files(self) -> None:
        """Rule 4."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_files)
        held, registration = self._directory, self._registration
        if held is None or registration is None or (self._serve_task and not self._serve_task.done()):
            return
        names = [f"{self._name}.json", *([f"{self._name}.sock"] if self._listener else [])]
        if all(os.path.lexists(held.path / name) for name in names):
            return
        try:
            self._recreate(held, registration)
        except (RipstopError, OSError) as error:
            if not self._failure_logged:
                log.warning("%s was removed, and commands on this machine cannot reach the job: %s", held.path, error)
            self._failure_logged = True
        else:
            self._failure_logged = False
            log.warning("%s was removed; its files were recreated", held.path)

    def _recreate(self, held: HeldDirectory, registration: Registration) -> None:
        self._directory = HeldDirectory(self._environ)
        held.release()
        registration.close()
        if (old := self._listener) is not None:
            path = self._directory.path / f"{self._name}.sock"
            path.unlink(missing_ok=True)
            asyncio.get_running_loop().remove_reader(old)
            self._listen(path)
            if self._runner is None:
                old.close()  # else the runner closes it
        self._registration = Registration(self._directory.path, self._name)
        self._registration.write(self._record)

    def _give_up(self, why: str) -> None:
        log.warning("commands on this machine cannot reach the job: %s", why)
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
        self._listener = listening
        asyncio.get_running_loop().add_reader(listening, self._on_first_connection)

    def _on_first_connection(self) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._serve_task = asyncio.create_task(self._serve(self._listener), name="ripstop-api")

    async def _serve(self, listening: socket.socket) -> None:
        """Rule 2.  An error here ends the socket, not the job."""
        try:
            await asyncio.to_thread(import_module, "ripstop.api.http_api")
            from aiohttp import web

            from ripstop.api.http_api import MAX_BODY, Api

            if self._runner is None:
                app = web.Application(client_max_size=MAX_BODY)
                Api(lambda: self.job, authorize_job_socket_user).mount(app)
                runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
                await runner.setup()
                self._runner = runner
            await web.SockSite(self._runner, listening).start()
        except Exception:
            log.exception("commands on this machine cannot reach the job")


def authorize_job_socket_user(request: "web.Request") -> str:
    """Admit only the job's user and root (rule 1); return who it is."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        raise RequestRefused(401, "the connection is closed")
    if not hasattr(socket, "SO_PEERCRED"):
        return "this user"
    _, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid not in (0, os.getuid()):
        raise RequestRefused(
            403, f"the job belongs to user {os.getuid()}, not to user {uid}; run the command as that user"
        )
    return f"user {uid}"  # not its name: looking that up may block


def _job_socket_certificate_path(path: Path | None) -> str:
    return str(path.absolute()) if path else ""

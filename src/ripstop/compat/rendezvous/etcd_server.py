"""`torch.distributed.elastic.rendezvous.etcd_server`: a local etcd, for one machine or for tests.

The program is `TORCHELASTIC_ETCD_BINARY_PATH`, or `etcd` on the PATH.  It listens on loopback only.  Unlike torch,
`stop` keeps a data directory that the caller gave, and removes only a temporary one.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TextIO

from ripstop.compat.rendezvous.sync_etcd_client import SyncEtcdClient
from ripstop.compat.utils import get_socket_with_port
from ripstop.election.etcd_client import Unavailable
from ripstop.model.config import ETCD_PREFIX, Etcd
from ripstop.model.round import Address

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

log = logging.getLogger("ripstop.compat")

HOST = "localhost"
STOP_TIMEOUT_S = 10.0  # from SIGTERM to SIGKILL
PROBE_TIMEOUT_S = 0.2  # for a reply, before checking that etcd still runs

Process = subprocess.Popen[bytes]
find_free_port = get_socket_with_port  # close the socket just before you use its port


def stop_etcd(subprocess: Process | None, data_dir: str | None = None) -> None:
    """Stop the process, if it runs, and remove its data."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        try:
            subprocess.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            subprocess.kill()
            subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """`start()` it, use `get_endpoint()` or `get_client()`, and `stop()` it; it also stops when the program exits."""

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._temporary_dir: str | None = None
        self._port = -1
        self._process: Process | None = None

    def get_port(self) -> int:
        return self._port

    def get_host(self) -> str:
        return HOST

    def get_endpoint(self) -> str:
        return f"{HOST}:{self._port}"

    def get_client(self) -> SyncEtcdClient:
        """A client for `EtcdStore` and `EtcdRendezvousBackend`."""
        return SyncEtcdClient(Etcd((Address(HOST, self._port),), ETCD_PREFIX))

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | TextIO | None = None) -> None:
        """Return when etcd answers; `TimeoutError` if it does not in time, `RuntimeError` if it has exited."""
        if self._process is not None and self._process.poll() is None:
            return
        program = _etcd_program()
        if self._data_dir is None:
            self._temporary_dir = tempfile.mkdtemp(prefix="ripstop_etcd_")
        for left in reversed(range(max(1, num_retries))):
            self._start(program, stderr)
            try:
                self._wait_until_ready(timeout)
            except (RuntimeError, TimeoutError) as error:
                stop_etcd(self._process, self._temporary_dir if left == 0 else None)
                if left == 0:
                    raise
                log.warning("%s; retrying", error)
            else:
                atexit.register(self._stop_at_exit, os.getpid())
                return

    def stop(self) -> None:
        """Stop etcd, and remove a temporary data directory."""
        atexit.unregister(self._stop_at_exit)
        stop_etcd(self._process, self._temporary_dir)

    def _stop_at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a fork
            self.stop()

    def _start(self, program: str, stderr: int | TextIO | None) -> None:
        with find_free_port() as client, find_free_port() as peer:
            self._port, peer_port = client.getsockname()[1], peer.getsockname()[1]
        here, there = f"http://{HOST}:{self._port}", f"http://{HOST}:{peer_port}"
        self._process = subprocess.Popen(
            [
                program, f"--data-dir={self._data_dir or self._temporary_dir}", "--logger=zap", "--log-level=warn",
                f"--listen-client-urls={here}", f"--advertise-client-urls={here}",
                f"--listen-peer-urls={there}", f"--initial-advertise-peer-urls={there}",
                f"--initial-cluster=default={there}",
            ],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )  # fmt: skip

    def _wait_until_ready(self, timeout: float) -> None:
        assert self._process is not None, "it was started"
        deadline = time.monotonic() + timeout
        client = self.get_client()
        try:
            while time.monotonic() < deadline:
                if (code := self._process.poll()) is not None:
                    raise RuntimeError(f"etcd exited with code {code} before it answered; see its stderr")
                try:
                    client.read([b"/"], PROBE_TIMEOUT_S)
                    return
                except Unavailable:
                    continue
        finally:
            client.close()
        raise TimeoutError(f"etcd did not answer at {self.get_endpoint()} in {timeout:g} s; give it a longer timeout")


def _etcd_program() -> str:
    name = "TORCHELASTIC_ETCD_BINARY_PATH"
    path = os.environ.get(name, "")
    if found := path if Path(path).is_file() else shutil.which("etcd"):
        return found
    raise FileNotFoundError(f"there is no etcd on the PATH and none at {name}={path}; install etcd-server, or set it")

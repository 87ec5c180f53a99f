"""Real etcd members on free ports of this machine, for tests; all are gone when the test is over."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import free_port, wait_until

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here: apt install etcd-server")


class Member:
    """One etcd process."""

    def __init__(
        self,
        name: str,
        folder: Path,
        flags: tuple[str, ...] = (),
        scheme: str = "http",
        address: str = "127.0.0.1",
        wrap: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.client = free_port()
        self.peer = f"http://{address}:{free_port()}"
        self.endpoint = f"{address}:{self.client}"
        self.scheme = scheme
        self.flags = flags
        self.wrap = wrap  # in front of the command
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str) -> None:
        self._cluster = cluster
        url = f"{self.scheme}://{self.endpoint}"
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.wrap, "etcd", "--logger=zap", "--log-level=warn",
                    f"--name={self.name}", f"--data-dir={self.folder}",
                    f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={self.peer}", f"--initial-advertise-peer-urls={self.peer}",
                    f"--initial-cluster={cluster}", "--initial-cluster-state=new", *self.flags,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def resume(self) -> None:
        """After a `signal` that stopped or killed it."""
        assert self.process is not None
        self.signal(signal.SIGCONT)
        if self.process.poll() is not None:
            self.start(self._cluster)

    def ask(self, path: str, body: dict[str, Any], timeout: float = 2.0) -> dict[str, Any] | None:
        """What the member answers; None when it does not."""
        request = urllib.request.Request(f"http://{self.endpoint}/v3/{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except OSError:
            return None

    def is_up(self) -> bool:
        """It serves clients and the cluster has a leader; with TLS, that it listens must do."""
        if self.scheme == "http":
            return self.ask("kv/range", {"key": encode("/")}) is not None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.client)) == 0

    def put(self, key: str, value: str) -> None:
        assert self.ask("kv/put", {"key": encode(key), "value": encode(value)}, timeout=60.0) is not None

    def keys(self, prefix: str = "/") -> dict[str, str]:
        answer = self.ask("kv/range", {"key": encode(prefix), "range_end": encode(prefix[:-1] + "0")}, timeout=60.0)
        assert answer is not None
        return {decode(kv["key"]): decode(kv["value"]) for kv in answer.get("kvs", ())}

    @property
    def leads(self) -> bool:
        status = self.ask("maintenance/status", {})
        return status is not None and status.get("leader") == status["header"]["member_id"]

    def lead(self, members: list["Member"]) -> None:
        """Make it the leader of these."""
        me = (self.ask("maintenance/status", {}) or {})["header"]["member_id"]
        for member in members:
            if member.leads and member is not self:
                member.ask("maintenance/transfer-leadership", {"targetID": me})
        wait_until(lambda: self.leads or None)


def encode(text: str) -> str:
    return b64encode(text.encode()).decode()


def decode(text: str) -> str:
    return b64decode(text).decode()


@contextmanager
def cluster(size: int, folder: Path, *flags: str, scheme: str = "http") -> Iterator[list[Member]]:
    """A healthy cluster of so many members."""
    with running([Member(f"m{number}", folder, flags, scheme) for number in range(size)]) as members:
        for member in members:
            wait_until(lambda member=member: member.is_up() or None)  # type: ignore[misc]
        yield members


@contextmanager
def running(members: list[Member]) -> Iterator[list[Member]]:
    """They are one cluster, and may not be up yet."""
    names = ",".join(f"{member.name}={member.peer}" for member in members)
    try:
        for member in members:
            member.start(names)
        yield members
    finally:
        for member in members:
            if member.process is not None:
                member.kill()


def endpoints(members: list[Member]) -> str:
    return ",".join(member.endpoint for member in members)


def certificates(folder: Path) -> Path:
    """A directory with an authority, a server's certificate for 127.0.0.1 and a client's without a name."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=authority")
    for name, subject in (("server", "/CN=etcd"), ("client", "/O=ripstop")):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)
    return folder

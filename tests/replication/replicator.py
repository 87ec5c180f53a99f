"""A real replicator process, whose agent is the test."""

import array
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Self
from zlib import crc32

from ripstop.commit_memory import (
    CONTENT_OFFSET,
    STAMP_OFFSET,
    CommitHeader,
    CommitId,
    commit_header_stamp,
    create_memory,
)

RUN_ID, SECRET = "job", "secret"
TIMEOUT_S = 120.0


class Replicator:
    """One node of one rank."""

    def __init__(self, rank: int, **setup: Any) -> None:
        self.rank = rank
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TIMEOUT_S)
        with theirs:
            argv = [sys.executable, "-P", "-m", "ripstop.replication.replicator", str(theirs.fileno())]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = int(listening.getsockname()[1])
            values = {"run_id": RUN_ID, "node": f"n{rank}", "token": SECRET, "bandwidth": 0, **setup}
            self.tell({"setup": values}, listening.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()

    def tell(self, message: dict[str, Any], *fds: int) -> None:
        self._channel.sendmsg(
            [json.dumps(message).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        )

    def start_round(self, number: int = 1, partner: int | None = None) -> None:
        ranks = {"number": number, "first_rank": self.rank, "ranks": 1, "world_size": 2, "interval": 0.0}
        self.tell({"round": {**ranks, "partner": ["127.0.0.1", partner] if partner else None}})

    def receive(self, timeout: float = TIMEOUT_S) -> tuple[dict[str, Any], list[int]]:
        """The next message to the agent."""
        self._channel.settimeout(timeout)
        data, fds, _, _ = socket.recv_fds(self._channel, 65536, 4)
        return json.loads(data), fds

    def dial(self) -> socket.socket:
        """A connection to the port, as soon as the process listens."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
            except ConnectionRefusedError:
                assert time.monotonic() < end, "the replicator does not listen"
                time.sleep(0.01)

    def is_silent(self, seconds: float = 0.5) -> bool:
        with suppress(TimeoutError):
            self.receive(seconds)
            return False
        return True

    def end(self) -> int:
        """The agent ends: the exit code."""
        self._channel.close()
        return self.process.wait(TIMEOUT_S)


class Buffer:
    """A worker's buffer."""

    def __init__(self, size: int = 100_000) -> None:
        self.fd = create_memory(CONTENT_OFFSET + size)
        self.map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        self.map[CONTENT_OFFSET : CONTENT_OFFSET + size] = os.urandom(size)
        self.end = CONTENT_OFFSET + size

    def commit(self, number: int, *, rank: int = 0, round: int = 1, flags: int = 0) -> None:
        id = CommitId(round, number)
        header = CommitHeader(crc32(RUN_ID.encode()), id, rank, 2, self.end - 10, 10, 0, flags).pack()
        self.map[: len(header)] = header
        self.map[STAMP_OFFSET : STAMP_OFFSET + 8] = commit_header_stamp(header)

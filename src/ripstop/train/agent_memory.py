"""A worker's connection to the memory that its agent keeps (`workers/state_memory.py` is the other end)."""

import array
import json
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ripstop.commit_memory import CommitId
from ripstop.train import interruption
from ripstop.train.reports import SOCKET_VARIABLE

PATH_SUFFIX = "-state"  # of the path of the socket for reports
REPLY_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0  # a worker may run before all workers of its node have started
RETRY_S = 0.01
MAX_REPLY_BYTES = 1 << 14
MAX_DESCRIPTORS = 128  # in a reply


class AgentError(Exception):
    """The agent rejects a request, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This worker, as its agent knows it."""

    round: int
    rank: int
    world_size: int
    key: str = field(default="", repr=False)  # that only the round's workers have; "": they have none
    checkpoint_dir: str = ""  # "": no checkpoints on disk
    checkpoint_interval: float = 0.0  # seconds


class AgentMemory:
    """One connection; AgentError if there is none."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(REPLY_TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise AgentError(f"{path}: {error.strerror or error}") from error
        self._has_message = select.poll()
        self._has_message.register(self._socket, select.POLLIN)
        self._held: set[CommitId] | None = None  # None: not asked for yet
        self._is_ending = False

    def identity(self) -> Identity:
        return Identity(**self._ask({"identity": None}, [])[0])

    def register(self) -> tuple[int, socket.socket]:
        """Tell the agent that this worker can go on in place: the round, and the connection for its messages."""
        reply, _ = self._ask({"elastic": None}, [])
        self._socket.settimeout(None)
        return int(reply["round"]), self._socket

    def get(self, name: str) -> dict[tuple[int, int], int]:
        """What this node holds of a State: descriptors by rank and slot, now owned by the caller."""
        reply, fds = self._ask({"get": name}, [])
        found = {(rank, slot): fd for (rank, slot), fd in zip(reply["buffers"], fds, strict=True)}
        for rank in reply["more"]:
            reply, fds = self._ask({"get": name, "of": rank}, [])
            found.update({(rank, slot): fd for slot, fd in zip(reply["slots"], fds, strict=True)})
        return found

    def keep(self, name: str, slot: int, descriptor: int) -> None:
        """Let the agent keep this buffer instead of the slot's old one."""
        self._ask({"keep": name, "slot": slot}, [descriptor])

    def save(self, name: str, slot: int, round: int, number: int, file: int | None = None) -> bool:
        """Have the agent save this commit to disk; False if it does not.  The buffer is in use until it is saved.

        The commit is in the buffer of this slot, or in a file.
        """
        files = [] if file is None else [file]
        reply, _ = self._ask({"save": name, "slot": slot, "commit": [round, number]}, files)
        return bool(reply["accepted"])

    def slots_in_use(self, name: str) -> list[int]:
        """This rank's buffers that are being saved to disk."""
        return list(self._ask({"saving": name}, [])[0]["slots"])

    def drop_others(self, name: str) -> None:
        """Let the agent free the buffers of ranks that do not run on this node."""
        self._ask({"drop": name}, [])

    def held(self, name: str) -> set[CommitId]:
        """The commits that must not be overwritten.  The agent sends changes, so that a call costs a microsecond."""
        if self._held is None:
            self._on_held(self._ask({"held": name}, [])[0])
        assert self._held is not None
        try:
            while self._has_message.poll(0):
                message, _ = self._receive()
                self._on_held(message)
        except (OSError, ValueError) as error:
            raise AgentError(f"the agent has gone: {error}") from error
        return self._held

    def is_final_commit_due(self, name: str) -> bool:
        """Whether this round is about to end, after one more commit."""
        self.held(name)
        return self._is_ending

    def final_commit_made(self, name: str, id: CommitId, slot: int, *, is_replicated: bool) -> None:
        """This rank has made the round's final commit of this State, in the buffer of this slot."""
        made = {"commit": [id.round, id.number], "slot": slot, "replicated": is_replicated}
        self._ask({"last": name, **made}, [])

    def wait_for_end(self) -> None:
        """This rank has made all its final commits.  Returns when its worker is being stopped.

        In a worker that goes on in place, it raises when the next round begins.
        """
        self._ask({"waits": None}, [])
        self._wait(None)

    def wait_for_replacement(self, name: str) -> None:
        """This worker went on in place, and has no commit of this State: returns when it is being stopped.

        AgentError if the agent does not stop it within REPLY_TIMEOUT_S.
        """
        self._ask({"state_lost": name}, [])
        self._is_ending = True
        self._wait(REPLY_TIMEOUT_S)

    def _wait(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)
        try:
            with interruption.interruptible_wait(self._shut_down):
                while self._is_ending:
                    self._on_held(self._receive()[0])
        except TimeoutError as error:
            interruption.raise_if_interrupted()
            raise AgentError(f"the agent did not stop this worker within {timeout:g} s") from error
        except (OSError, ValueError) as error:
            interruption.raise_if_interrupted()
            raise AgentError(f"the agent has gone: {error}") from error
        finally:
            self._socket.settimeout(REPLY_TIMEOUT_S)

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _on_held(self, message: dict[str, Any]) -> None:
        self._held = {CommitId(*id) for id in message["held"]}
        self._is_ending = bool(message.get("ending"))

    def _ask(self, request: dict[str, object], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                reply, received = self._exchange(json.dumps(request).encode(), fds)
            except (OSError, ValueError) as error:
                raise AgentError(f"the agent does not answer: {error}") from error
            if "retry" not in reply:
                break
            if time.monotonic() > give_up_at:
                raise AgentError(reply["retry"])
            time.sleep(RETRY_S)
        if "stale" in reply:
            raise interruption.Interrupted(reply["stale"])
        if "error" in reply:
            raise AgentError(reply["error"])
        return reply, received

    def _exchange(self, request: bytes, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([request], ancillary)
        while "held" in (reply := self._receive())[0] and self._held is not None:
            self._on_held(reply[0])
        return reply

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, ancillary_data, _, _ = self._socket.recvmsg(
            MAX_REPLY_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
        )
        received = array.array("i")
        for level, kind, value in ancillary_data:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(value[: len(value) - len(value) % received.itemsize])
        return json.loads(data), list(received)


def connect_agent_memory() -> AgentMemory | None:
    """None outside a ripstop job."""
    path = os.environ.get(SOCKET_VARIABLE)
    return AgentMemory(path + PATH_SUFFIX) if path else None

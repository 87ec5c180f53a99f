"""The channel between the agent and its zygote: a socket pair.  A message is a 4-byte length and a marshalled value.

Both ends are the same interpreter on the same machine, so marshal is safe and needs no import.
"""

from __future__ import annotations

import _socket
import marshal
import sys

TYPE_CHECKING = False  # typing itself would be imported in every worker
if TYPE_CHECKING:
    from typing import Any

CHANNEL_FD_VARIABLE = "RIPSTOP_ZYGOTE"  # holds the number of the channel's file descriptor
PADDING_VARIABLE = "RIPSTOP_PADDING"  # reserves space in /proc/PID/environ for the workers' own variables
LENGTH_BYTES = 4
CHECK = "check"  # to a standby: look now whether a file has changed
MAX_CONTROL_BYTES = 1100  # for 253 descriptors, the most that the kernel passes at once


def encode_channel_message(message: Any) -> bytes:
    data = marshal.dumps(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class Channel:
    """The zygote's end."""

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(fileno=fd)

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its file descriptors; raise EOFError when the agent has ended."""
        fds: list[int] = []
        size = int.from_bytes(self._read(LENGTH_BYTES, fds), "big")
        return marshal.loads(self._read(size, fds)), fds

    def _read(self, size: int, fds: list[int]) -> bytes:
        data = b""
        while len(data) < size:
            part, ancillary, _, _ = self.socket.recvmsg(size - len(data), MAX_CONTROL_BYTES, _socket.MSG_CMSG_CLOEXEC)
            if not part:
                raise EOFError
            data += part
            for _, _, ints in ancillary:
                fds += [int.from_bytes(ints[i : i + 4], sys.byteorder) for i in range(0, len(ints), 4)]
        return data

    def send(self, message: Any) -> None:
        self.socket.sendall(encode_channel_message(message))

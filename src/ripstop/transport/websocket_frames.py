"""WebSocket frames (RFC 6455) as the coordinator reads and writes them.  Pure.

Rules: (1) an agent's message is one masked frame of at most `MAX_FRAME_BYTES`; anything else is a `ProtocolError`; (2)
an agent's heartbeat is a Ping without data, or a Pong if the agent wants no answer: nothing has to decode it.
"""

from collections.abc import Iterator
from enum import IntEnum

from ripstop.model.errors import ProtocolError
from ripstop.protocol.codec import MAX_FRAME_BYTES

AGENT_HEARTBEAT_SIZE = 6  # with the mask of an agent's frame
PING_START, PONG_START = 0x89, 0x8A
MAX_CONTROL_BYTES = 125
FINAL = 0x80
MASKED = 0x80
SIZE_IN_2_BYTES, SIZE_IN_8_BYTES = 126, 127


class Opcode(IntEnum):
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_OPCODES = {int(opcode): opcode for opcode in Opcode}


def text_frame(text: str) -> bytes:
    return _frame(Opcode.TEXT, text.encode())


def close_frame(code: int = 1000) -> bytes:
    return _frame(Opcode.CLOSE, code.to_bytes(2, "big"))


def pong_frame(data: bytes) -> bytes:
    return _frame(Opcode.PONG, data)


def _frame(opcode: Opcode, data: bytes) -> bytes:
    first, size = FINAL | opcode, len(data)
    if size < SIZE_IN_2_BYTES:
        return bytes((first, size)) + data
    if size < 1 << 16:
        return bytes((first, SIZE_IN_2_BYTES)) + size.to_bytes(2, "big") + data
    return bytes((first, SIZE_IN_8_BYTES)) + size.to_bytes(8, "big") + data


class FrameReader:
    """Splits the bytes from one agent into frames."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame

    @property
    def is_within_frame(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> Iterator[tuple[Opcode, bytes]]:
        """The frames that are now complete.  Read all of them before the next call."""
        self._rest += data
        while (frame := self._next_frame()) is not None:
            yield frame

    def _next_frame(self) -> tuple[Opcode, bytes] | None:
        rest = self._rest
        if len(rest) < 2:
            return None
        size, start = rest[1] & ~MASKED, 2
        if size >= SIZE_IN_2_BYTES:
            start = 4 if size == SIZE_IN_2_BYTES else 10
            if len(rest) < start:
                return None
            size = int.from_bytes(rest[2:start], "big")
        opcode = _checked_websocket_frame(rest[0], rest[1], size)
        mask, start = rest[start : start + 4], start + 4
        if len(rest) < start + size:
            return None
        self._rest = rest[start + size :]
        return opcode, _unmasked_payload(rest[start : start + size], mask)


def _checked_websocket_frame(first: int, second: int, size: int) -> Opcode:
    opcode = _OPCODES.get(first & ~FINAL)
    if opcode is None or not first & FINAL or not second & MASKED:
        raise ProtocolError(f"a message is one masked WebSocket frame, received one that begins with {first:#x}")
    if size > (MAX_FRAME_BYTES if opcode < Opcode.CLOSE else MAX_CONTROL_BYTES):
        raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, this one has {size}")
    return opcode


def _unmasked_payload(data: bytes, mask: bytes) -> bytes:
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")

"""WebSocket frames of an agent, as the coordinator reads them."""

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripstop.model.errors import ProtocolError
from ripstop.protocol.codec import MAX_FRAME_BYTES, decode, encode
from ripstop.protocol.messages import StandBy
from ripstop.transport.websocket_frames import AGENT_HEARTBEAT_SIZE, FrameReader, Opcode, text_frame
from tests.transport.test_server import connection, do_handshake


def agent_frame(opcode: int, payload: bytes, mask: bytes = b"\1\2\3\4") -> bytes:
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


HEARTBEAT = agent_frame(Opcode.PONG, b"")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([Opcode.TEXT, Opcode.PONG, Opcode.CLOSE]), st.binary(max_size=125)), max_size=5),
    st.lists(st.integers(0, 700), max_size=8),
)
def test_frames_are_the_same_however_the_bytes_are_split(frames: list[tuple[Opcode, bytes]], cuts: list[int]) -> None:
    data = b"".join(agent_frame(opcode, payload) for opcode, payload in frames)
    reader, read = FrameReader(), []
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        read += reader.feed(data[at:cut])
        at = max(at, cut)
    assert read == frames
    assert not reader.is_within_frame


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536, MAX_FRAME_BYTES])
def test_a_message_may_have_any_size_up_to_the_limit(size: int) -> None:
    assert list(FrameReader().feed(agent_frame(Opcode.TEXT, b"x" * size))) == [(Opcode.TEXT, b"x" * size)]


INVALID = {
    "a frame that is too large": b"\x81\xff" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
    "a frame without a mask": b"\x81\x02hi",
    "a message in two frames": b"\x01\x82\0\0\0\0hi",
    "a reserved bit": b"\xc1\x82\0\0\0\0hi",
    "an unknown type": b"\x83\x82\0\0\0\0hi",
    "a large control frame": b"\x8a\xfe\x00\x7e",
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_frame_is_a_protocol_error_before_its_payload_has_arrived(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(FrameReader().feed(data))


def test_bytes_like_a_heartbeat_within_a_message_are_part_of_the_message(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await do_handshake(ws)
            transport = ws.get_extra_info("socket")
            mask = b"\x8a\x80\x00\x00"  # the beginning of a heartbeat
            join = encode(harness.join("a")).encode()
            frame = agent_frame(Opcode.TEXT, join, mask)
            loop = asyncio.get_running_loop()
            head = frame[: -len(join) - 4]
            assert len(HEARTBEAT) == AGENT_HEARTBEAT_SIZE
            tail = frame[len(head) :]
            for part in (head, tail[:AGENT_HEARTBEAT_SIZE], tail[AGENT_HEARTBEAT_SIZE:]):
                await loop.run_in_executor(None, transport._sock.sendall, part)
                await asyncio.sleep(0.05)  # the coordinator reads the parts one by one; together, they prove less
            assert "Assign" in await ws.receive_str()
            assert coordinator.forgotten == []

    asyncio.run(scenario())


def test_a_message_of_the_coordinator_of_any_size_arrives(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await do_handshake(ws)
            await coordinator.until(lambda c: len(c.attached) == 1)
            for size in (1, 60_000, MAX_FRAME_BYTES - 100):
                coordinator.attached[0].send(StandBy(size, "x" * size))
                assert decode(await ws.receive_str(), (StandBy,)).round == size

    asyncio.run(scenario())


def test_a_short_text_has_two_bytes_of_header() -> None:
    assert text_frame("hi") == b"\x81\x02hi"

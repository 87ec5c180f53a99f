"""Replicator processes: what they copy, and what they do not."""

import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from ripstop.commit_memory import IS_REPLICATED
from ripstop.replication.peer_connection import PeerConnection, PeerError, connect_to_peer
from ripstop.replication.replicator import SECONDS_BEFORE_REPORT
from tests.certificates import Authority
from tests.replication.replicator import RUN_ID, SECRET, TIMEOUT_S, Buffer, Replicator


@pytest.fixture
def nodes() -> Iterator[tuple[Replicator, Replicator]]:
    with Replicator(0) as sender, Replicator(1) as receiver:
        start(sender, receiver)
        yield sender, receiver


@pytest.fixture(scope="module")
def receiver() -> Iterator[Replicator]:
    """A node that other processes attack."""
    with Replicator(1) as receiver:
        receiver.start_round(1)
        yield receiver


def start(sender: Replicator, receiver: Replicator, round: int = 1) -> None:
    receiver.start_round(round)
    sender.start_round(round, receiver.port)


def commits(node: Replicator, *numbers: int, size: int = 100_000, flags: int = 0) -> list[Buffer]:
    """The node has these commits."""
    made = []
    for slot, number in enumerate(numbers):
        buffer = Buffer(size)
        buffer.commit(number, rank=node.rank, flags=flags)
        node.tell({"buffer": [node.rank, "state", slot]}, buffer.fd)
        made.append(buffer)
    return made


def peer(node: Replicator, *, token: str = SECRET, round: int = 1, run_id: str = RUN_ID) -> PeerConnection:
    node.dial().close()
    return connect_to_peer("127.0.0.1", node.port, tls=None, token=token, run_id=run_id, node="x", round=round)


def put(connection: PeerConnection, size: int, **more: object) -> dict[str, object]:
    request = {"put": "state", "size": size, "rank": 0, "world_size": 2, "round": 1, "number": 7}
    connection.send(request | more)
    return connection.receive()


def check_copy(sender: Replicator, receiver: Replicator, buffer: Buffer, number: int) -> None:
    """The receiver hands the commit to its agent, and the sender reports it after the agent has kept it."""
    message, (fd,) = receiver.receive()
    assert message == {"copy": {"rank": 0, "state": "state", "round": 1, "number": number}}
    assert os.pread(fd, buffer.end, 0) == buffer.map[: buffer.end]
    receiver.tell({"kept": True})
    wait_for_report(sender, copied=number)
    os.close(fd)


def wait_for_report(sender: Replicator, **like: int) -> None:
    """Wait for this report; the first one, of the newest commit, and a warning may come before."""
    while True:
        message, _ = sender.receive()
        if "warning" in message:  # the partner was slow to start
            continue
        found = message["report"]
        if all(found[name] == value for name, value in like.items()):
            return
        assert found["copied"] == found["missed"] == 0


def test_a_set_is_copied_and_reported(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    first, second = commits(sender, 6, 7)
    for buffer, number in ((first, 8), (second, 10)):
        sender.tell({"replicate": ["state", 1, number]})
        assert receiver.is_silent(0.1)
        buffer.commit(number)
        check_copy(sender, receiver, buffer, number)


def test_a_copy_that_the_agent_does_not_keep_is_not_reported(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    commits(sender, 7)
    sender.tell({"replicate": ["state", 1, 7]})
    for _ in range(2):  # it is tried again
        receiver.receive()
        receiver.tell({"kept": False})
    receiver.receive()
    receiver.tell({"kept": True})
    wait_for_report(sender, copied=7)  # and none before it


def test_the_first_report_names_the_newest_commit(nodes: tuple[Replicator, Replicator]) -> None:
    sender, _ = nodes
    commits(sender, 6, 7)
    expected = {"round": 1, "state": "state", "newest": 7, "copied": 0, "missed": 0, "size": 0}
    assert sender.receive()[0] == {"report": expected}


def test_a_state_that_all_ranks_have_is_not_copied(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    (buffer,) = commits(sender, 6, flags=IS_REPLICATED)
    sender.tell({"replicate": ["state", 1, 6]})
    assert sender.is_silent(SECONDS_BEFORE_REPORT + 1)
    sender.tell({"replicate": ["state", 1, 7]})
    assert receiver.is_silent(0.1)
    buffer.commit(7)  # now the ranks differ
    message, _ = receiver.receive()
    assert message["copy"]["number"] == 7


def test_a_passed_commit_is_missed(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    commits(sender, 7)
    sender.tell({"replicate": ["state", 1, 6]})
    wait_for_report(sender, missed=6)
    assert receiver.is_silent(0.1)


def test_a_commit_that_is_overwritten_meanwhile_is_no_copy() -> None:
    with Replicator(0, bandwidth=5_000_000) as sender, Replicator(1) as receiver:
        start(sender, receiver)
        (buffer,) = commits(sender, 7, size=20_000_000)
        sender.tell({"replicate": ["state", 1, 7]})
        time.sleep(0.5)  # of four seconds
        buffer.commit(9)
        wait_for_report(sender, missed=7)
        assert receiver.is_silent(0.1)


def test_the_bandwidth_is_limited() -> None:
    with Replicator(0, bandwidth=20_000_000) as sender, Replicator(1) as receiver:
        start(sender, receiver)
        (buffer,) = commits(sender, 7, size=20_000_000)
        began = time.monotonic()
        sender.tell({"replicate": ["state", 1, 7]})
        check_copy(sender, receiver, buffer, 7)
        assert time.monotonic() - began >= 0.9


def test_a_partner_that_comes_later_gets_the_copy(nodes: tuple[Replicator, Replicator]) -> None:
    with Replicator(0) as sender, Replicator(1) as receiver:
        sender.start_round(1, receiver.port)  # the receiver does not listen yet
        (buffer,) = commits(sender, 7)
        sender.tell({"replicate": ["state", 1, 7]})
        time.sleep(0.5)
        receiver.start_round(1)
        check_copy(sender, receiver, buffer, 7)


def test_a_dead_partner_is_one_warning(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    receiver.end()
    commits(sender, 7)
    sender.tell({"replicate": ["state", 1, 7]})
    messages = [sender.receive()[0] for _ in range(2)]  # the report of the newest commit comes some time
    (warning,) = [message["warning"] for message in messages if "warning" in message]
    assert "connection refused; training goes on" in warning
    assert sender.is_silent(2.0)


def test_a_new_round_reconnects(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    (buffer,) = commits(sender, 7)
    sender.tell({"replicate": ["state", 1, 7]})
    check_copy(sender, receiver, buffer, 7)
    start(sender, receiver, round=2)
    buffer.commit(8, round=2)
    sender.tell({"buffer": [0, "state", 0]}, buffer.fd)
    sender.tell({"replicate": ["state", 2, 8]})
    assert receiver.receive()[0]["copy"]["round"] == 2


@pytest.mark.parametrize("has_listened", [True, False])
def test_the_process_ends_with_its_agent(has_listened: bool) -> None:
    with Replicator(0) as node:
        if has_listened:
            node.start_round()
            peer(node)
        assert node.end() == 0


# TLS ------------------------------------------------------------------------------------------------------------------


def test_with_tls_both_sides_verify_certificates(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    files, foreign = Authority(tmp_path / "own").node(), Authority(tmp_path / "other").node()
    tls = {"has_tls": True, "cert": str(files.cert), "key": str(files.key), "ca": str(files.ca)}
    with Replicator(0, **tls) as sender, Replicator(1, **tls) as receiver:
        start(sender, receiver)
        (buffer,) = commits(sender, 7)
        sender.tell({"replicate": ["state", 1, 7]})
        check_copy(sender, receiver, buffer, 7)
        with pytest.raises((OSError, PeerError)):
            peer(receiver)  # no TLS
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname = False
        stranger.load_verify_locations(files.ca)
        assert foreign.cert is not None
        stranger.load_cert_chain(foreign.cert, foreign.key)
        raw = receiver.dial()
        with pytest.raises(OSError), stranger.wrap_socket(raw) as wrapped:  # TLS 1.3 rejects it after the handshake
            wrapped.recv(100)
    with Replicator(0, **tls) as sender, Replicator(1) as receiver:
        start(sender, receiver)
        commits(sender, 7)
        sender.tell({"replicate": ["state", 1, 7]})
        messages = [sender.receive()[0] for _ in range(2)]
        assert any("training goes on" in message.get("warning", "") for message in messages)


# peers that are not of the job, or do not keep to the protocol --------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"token": "guess"}, {"token": ""}, {"run_id": "another"}])
def test_a_peer_without_the_secret_gets_no_reply(receiver: Replicator, wrong: dict[str, str]) -> None:
    with pytest.raises(PeerError, match="the peer closed the connection"):
        peer(receiver, **wrong)


@pytest.mark.parametrize("round", [0, 2])
def test_a_peer_of_another_round_is_rejected(receiver: Replicator, round: int) -> None:
    with pytest.raises(PeerError, match="this node is in round 1"):
        peer(receiver, round=round)


def test_more_than_the_free_memory_is_declined(receiver: Replicator) -> None:
    reply = put(peer(receiver), 1 << 43)
    assert "the partner has too little memory: a buffer needs 8.8e+03 GB and" in str(reply["error"])


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"size": -1}, {"size": 1 << 60}, {"rank": 2}, {"rank": -1}, {"put": ""}, {"put": "x" * 65},
     {"put": 5}, {"size": "1"}, {"rank": 1}, {"world_size": 1}, {"world_size": 3, "rank": 2}, {"number": 0},
     {"number": -1}, {"number": 1 << 63}],
)  # fmt: skip
def test_invalid_requests_end_the_connection(receiver: Replicator, wrong: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="the peer closed the connection"):
        put(peer(receiver), **{"size": 10_000, **wrong})
    assert receiver.is_silent(0.1)


def content(number: int = 7, rank: int = 0) -> bytes:
    buffer = Buffer(1000)
    buffer.commit(number, rank=rank)
    return buffer.map[: buffer.end]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (content(number=8), "the copy is not the commit that was announced"),
        (content(rank=1), "the copy is not the commit that was announced"),
        (bytes(5096), "the copy is not the commit that was announced"),
        (content()[:-1] + b"!", "the checksum differs"),
    ],
)
def test_a_damaged_copy_is_rejected(receiver: Replicator, data: bytes, why: str) -> None:
    connection = peer(receiver)
    assert put(connection, len(data)) == {"ok": True}
    connection.socket.sendall(data)
    damaged = why == "the checksum differs"
    connection.send({"checksum": crc32(data) ^ damaged})
    assert connection.receive() == {"error": why}
    assert receiver.is_silent(0.1)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x01{"]
)
def test_garbage_ends_the_connection(receiver: Replicator, garbage: bytes) -> None:
    with receiver.dial() as raw:
        raw.recv(1000)  # the nonce
        raw.sendall(garbage)
        assert raw.recv(1000) == b""
    peer(receiver)


def test_silent_and_slow_peers_are_bounded_and_block_no_one(nodes: tuple[Replicator, Replicator]) -> None:
    sender, receiver = nodes
    idle = [receiver.dial() for _ in range(40)]
    (buffer,) = commits(sender, 7)
    sender.tell({"replicate": ["state", 1, 7]})
    check_copy(sender, receiver, buffer, 7)
    threads = len(list(Path(f"/proc/{receiver.process.pid}/task").iterdir()))
    assert threads <= 15
    began = time.monotonic()
    slow = idle[-1]
    slow.settimeout(TIMEOUT_S)
    while slow.recv(1000):
        slow.send(b"\x00")  # never enough for a message
    assert time.monotonic() - began < TIMEOUT_S
    for each in idle:
        each.close()

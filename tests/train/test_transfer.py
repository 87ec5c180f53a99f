"""Copies from worker to worker: what arrives, who is served, and that damage is noticed."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from ripstop.train import transfer
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.digest import CHUNK_BYTES, Digest, digest
from ripstop.train.transfer import PeerSource, TransferError, TransferGiver, TransferReceiver

KEY = bytes(range(32))
SIZE = 2 * CHUNK_BYTES + 4096


@pytest.fixture
def buffer() -> CommitBuffer:
    buffer = CommitBuffer.create(SIZE)
    buffer.bytes.random_(generator=torch.Generator().manual_seed(1))
    return buffer


@pytest.fixture
def giver(buffer: CommitBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferGiver]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with TransferGiver(KEY, {3: buffer}, 2) as giver:
        yield giver


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (0, 1), (4095, 8194), (SIZE - 7, 7), (CHUNK_BYTES - 1, 0)])
def test_every_part_of_a_buffer_arrives(giver: TransferGiver, buffer: CommitBuffer, offset: int, size: int) -> None:
    with TransferReceiver(giver.host, giver.port, KEY) as receiver:
        source = PeerSource(receiver, 3)
        for _ in range(2):
            assert source.read(offset, size).equal(buffer.bytes[offset : offset + size])
            assert receiver.read_bytes(3, offset, size) == buffer.memory(offset, offset + size)


@pytest.mark.parametrize(("shard", "offset", "size"), [(2, 0, 1), (3, -1, 1), (3, SIZE, 1), (3, 8, -1)])
def test_a_request_for_something_else_gets_no_byte(giver: TransferGiver, shard: int, offset: int, size: int) -> None:
    with TransferReceiver(giver.host, giver.port, KEY) as receiver:
        receiver._socket.sendall(transfer._REQUEST.pack(shard, offset, size, False))
        assert receiver._socket.recv(1) == b""


def test_a_receiver_without_the_key_gets_no_byte(giver: TransferGiver) -> None:
    with TransferReceiver(giver.host, giver.port, bytes(32)) as receiver, pytest.raises(TransferError):
        receiver.read_bytes(3, 0, 1)
    with socket.create_connection((giver.host, giver.port)) as raw:
        nonce = raw.recv(transfer.NONCE_BYTES, socket.MSG_WAITALL)
        raw.sendall(nonce + bytes(transfer.MAC_BYTES))
        assert raw.recv(1) == b""


def test_a_recorded_proof_is_of_no_use(giver: TransferGiver) -> None:
    nonce = bytes(transfer.NONCE_BYTES)
    with socket.create_connection((giver.host, giver.port)) as raw:
        first = raw.recv(transfer.NONCE_BYTES, socket.MSG_WAITALL)
        proof = nonce + transfer._transfer_mac(KEY, b"receiver", first + nonce)
        raw.sendall(proof + transfer._REQUEST.pack(3, 0, 1, False))
        assert len(raw.recv(1 + transfer.MAC_BYTES, socket.MSG_WAITALL)) == 1 + transfer.MAC_BYTES
    with socket.create_connection((giver.host, giver.port)) as raw:
        assert raw.recv(transfer.NONCE_BYTES, socket.MSG_WAITALL) != first
        raw.sendall(proof)
        assert raw.recv(1) == b""


def test_a_giver_without_the_key_is_noticed(buffer: CommitBuffer, giver: TransferGiver) -> None:
    """It accepts any proof, and sends bytes with a MAC of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    nonce = bytes(transfer.NONCE_BYTES)
                    connection.sendall(nonce)
                    own = connection.recv(transfer.NONCE_BYTES + transfer.MAC_BYTES, socket.MSG_WAITALL)
                    false = TransferGiver.__new__(TransferGiver)
                    false._key, false._buffers = bytes(32), {3: buffer}
                    false._answer(connection, nonce + own[: transfer.NONCE_BYTES])

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        with (
            TransferReceiver("127.0.0.1", port, KEY) as receiver,
            pytest.raises(TransferError, match="do not match their MAC"),
        ):
            receiver.read_bytes(3, 0, 100)
        with (
            TransferReceiver("127.0.0.1", port, KEY) as receiver,
            pytest.raises(TransferError, match="do not match their MAC"),
        ):
            PeerSource(receiver, 3).read(0, 100)
        thread.join()


@pytest.mark.parametrize("is_unpickled", [False, True])
def test_a_changed_byte_is_noticed(giver: TransferGiver, is_unpickled: bool) -> None:
    """A relay between giver and receiver changes one byte of the content."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            there, _ = listener.accept()
            with there, socket.create_connection((giver.host, giver.port)) as back:
                there.sendall(back.recv(transfer.NONCE_BYTES, socket.MSG_WAITALL))
                request = transfer.NONCE_BYTES + transfer.MAC_BYTES + transfer._REQUEST.size
                back.sendall(there.recv(request, socket.MSG_WAITALL))
                data = bytearray(back.recv(10_000 + transfer.MAC_BYTES, socket.MSG_WAITALL))
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
                there.sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        wrong = pytest.raises(TransferError, match="10000 bytes of shard 3 do not match their MAC")
        with TransferReceiver("127.0.0.1", listener.getsockname()[1], KEY) as receiver, wrong:
            if is_unpickled:
                receiver.read_bytes(3, 100, 10_000)
            else:
                PeerSource(receiver, 3).read(100, 10_000)
        thread.join()


def test_more_connections_than_ranks_are_closed(giver: TransferGiver) -> None:
    with ExitStack() as opened:
        address = giver.host, giver.port
        kept = [opened.enter_context(socket.create_connection(address)) for _ in range(2 + transfer.MORE_CONNECTIONS)]
        assert all(len(each.recv(100)) == transfer.NONCE_BYTES for each in kept)
        with socket.create_connection(address) as another:
            assert another.recv(1) == b""
        for each in kept:  # silent ones are closed after HANDSHAKE_TIMEOUT_S
            assert each.recv(1) == b""
    with TransferReceiver(*address, KEY) as receiver:
        receiver.read_bytes(3, 0, 1)


def test_a_slow_proof_is_cut_off(giver: TransferGiver) -> None:
    with socket.create_connection((giver.host, giver.port)) as slow:
        slow.recv(transfer.NONCE_BYTES, socket.MSG_WAITALL)
        slow.settimeout(0.5)
        sent = 0
        while True:
            try:
                assert slow.recv(1) == b""
                break
            except ConnectionResetError:  # a byte came while it was closed
                break
            except TimeoutError:
                slow.sendall(b"x")  # never idle for long
                sent += 1
                assert sent < transfer.NONCE_BYTES + transfer.MAC_BYTES


def test_a_closed_giver_is_an_error(giver: TransferGiver) -> None:
    with TransferReceiver(giver.host, giver.port, KEY) as receiver:
        giver.__exit__()
        with pytest.raises(TransferError):
            PeerSource(receiver, 3).read(0, 1)
    with pytest.raises(TransferError):
        TransferReceiver(giver.host, giver.port, KEY)


def test_a_node_whose_name_is_its_loopback_is_reached_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(host: str, address: str) -> tuple[str, str]:
        found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 1))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", "1")
        return transfer._giver_addresses()

    assert addresses("127.0.0.1", "127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert addresses("localhost", "127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert addresses("node1", "127.0.1.1") == ("0.0.0.0", "node1")


def test_a_digest_notices_single_bits_swapped_words_zeros_and_lengths() -> None:
    content = torch.randint(0, 255, (3 * 4096 + 24,), dtype=torch.uint8)
    seen = {digest(content), digest(content[:-1]), digest(torch.cat([content, torch.zeros(1, dtype=torch.uint8)]))}
    for place in (0, 4095, 4096, len(content) - 1):
        changed = content.clone()
        changed[place] ^= 1
        seen.add(digest(changed))
    words = content.view(torch.int64)
    for a, b in ((0, 1), (0, 512), (1, 513), (511, 512), (0, len(words) - 1)):
        swapped = words.clone()
        swapped[a], swapped[b] = words[b], words[a]
        seen.add(digest(swapped.view(torch.uint8)))
    assert len(seen) == 12


def test_a_digest_is_arithmetic_modulo_two_to_the_64() -> None:
    from ripstop.train import digest as module

    words = torch.randint(-(2**63), 2**63 - 1, (2, 512))
    rows = [sum(int(w) * int(c) for w, c in zip(row, module._column_weights, strict=True)) for row in words]
    value = sum(row * int(weight) for row, weight in zip(rows, module._row_weights, strict=False))
    found = Digest()
    found.update(words.view(-1).view(torch.uint8))
    assert found.value == (value * module._FACTOR + 8192) % 2**64

"""Copies from worker to worker: what arrives, who is served, and that damage is noticed."""

import random
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from ripstop.train import transfer
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.digest import CHUNK_BYTES, Digest, digest
from ripstop.train.transfer import Giver, PeerSource, Receiver, TransferError

TOKEN = bytes(range(16))
SIZE = 2 * CHUNK_BYTES + 4096


@pytest.fixture
def buffer() -> CommitBuffer:
    buffer = CommitBuffer.create(SIZE)
    buffer.bytes.random_(generator=torch.Generator().manual_seed(1))
    return buffer


@pytest.fixture
def giver(buffer: CommitBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Giver]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with Giver(TOKEN, {3: buffer}) as giver:
        yield giver


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (0, 1), (4095, 8194), (SIZE - 7, 7), (CHUNK_BYTES - 1, 0)])
def test_every_part_of_a_buffer_arrives(giver: Giver, buffer: CommitBuffer, offset: int, size: int) -> None:
    with Receiver(giver.host, giver.port, TOKEN) as receiver:
        source = PeerSource(receiver, 3)
        for _ in range(2):
            assert source.read(offset, size).equal(buffer.bytes[offset : offset + size])


@pytest.mark.parametrize(
    ("token", "shard", "offset", "size"),
    [(bytes(16), 3, 0, 1), (TOKEN, 2, 0, 1), (TOKEN, 3, -1, 1), (TOKEN, 3, SIZE, 1), (TOKEN, 3, 8, -1)],
)
def test_a_request_without_the_token_or_for_something_else_gets_no_byte(
    giver: Giver, token: bytes, shard: int, offset: int, size: int
) -> None:
    with socket.create_connection((giver.host, giver.port)) as raw:
        raw.sendall(transfer._REQUEST.pack(token, shard, offset, size))
        assert raw.recv(1) == b""


def test_a_changed_byte_is_noticed(giver: Giver) -> None:
    """A relay between giver and receiver changes one byte of the content."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            there, _ = listener.accept()
            with there, socket.create_connection((giver.host, giver.port)) as back:
                back.sendall(there.recv(transfer._REQUEST.size, socket.MSG_WAITALL))
                data = bytearray(back.recv(10_008, socket.MSG_WAITALL))
                data[random.randrange(10_000)] ^= 1 << random.randrange(8)
                there.sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        wrong = pytest.raises(TransferError, match="10000 bytes of shard 3 do not match their digest")
        with Receiver("127.0.0.1", listener.getsockname()[1], TOKEN) as receiver, wrong:
            PeerSource(receiver, 3).read(100, 10_000)
        thread.join()


def test_a_closed_giver_is_an_error(giver: Giver) -> None:
    with Receiver(giver.host, giver.port, TOKEN) as receiver:
        giver.__exit__()
        with pytest.raises(TransferError):
            PeerSource(receiver, 3).read(0, 1)
    with pytest.raises(TransferError):
        Receiver(giver.host, giver.port, TOKEN)


def test_a_node_whose_name_is_its_loopback_is_reached_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(host: str, address: str) -> tuple[str, str]:
        found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 1))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", "1")
        return transfer._addresses()

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

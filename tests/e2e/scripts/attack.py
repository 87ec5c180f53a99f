"""Does to a coordinator's port what a stranger might: python attack.py KIND HOST:PORT SECONDS [COUNT]

Prints one JSON line: how many connections were tried, how many were cut off or refused by the other side, how many were
let in.  A `replay` first makes one honest handshake, with the secret in $ATTACK_TOKEN, and then repeats its words.
"""

import asyncio
import hashlib
import hmac
import json
import os
import resource
import sys
import time

UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cmlwc3RvcCBiZW5jaCEhIQ==\r\n\r\n"
)
JOB = "e2e"
tally = {"tried": 0, "refused": 0, "accepted": 0}


def frame(**fields):
    payload = json.dumps({"v": 1, **fields}).encode()
    return b"\x81\xfe" + len(payload).to_bytes(2, "big") + b"\0\0\0\0" + payload


def hello(job, node, challenge, token):
    parts = [part.encode() for part in ("agent", job, node, challenge, "00")]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    proof = hmac.new(token.encode(), b"ripstop" + framed, hashlib.sha256).hexdigest()
    return frame(type="Hello", run_id=job, node=node, nonce="00", proof=proof)


async def receive(reader):
    head = await reader.readexactly(2)
    size = head[1] if head[1] < 126 else int.from_bytes(await reader.readexactly(2), "big")
    return json.loads(await reader.readexactly(size))


async def knock(reader, writer, words):
    """A handshake: `words` makes a Hello of the coordinator's nonce.  What the answer was."""
    writer.write(UPGRADE)
    await reader.readuntil(b"\r\n\r\n")
    challenge = await receive(reader)
    writer.write(words(challenge["nonce"]))
    return (await receive(reader))["type"]


async def liar(reader, writer, words):
    answer = await knock(reader, writer, words)
    tally["accepted" if answer == "Welcome" else "refused"] += 1


async def wait_for_end(reader):
    while await reader.read(65536):
        pass
    tally["refused"] += 1


async def idle(reader, writer):
    await wait_for_end(reader)


async def half_open(reader, writer):
    writer.write(UPGRADE[: len(UPGRADE) // 2])
    writer.write_eof()
    await wait_for_end(reader)


async def slow(reader, writer):
    for byte in UPGRADE:
        if reader.at_eof():
            break
        writer.write(bytes((byte,)))
        await asyncio.sleep(0.2)
    await wait_for_end(reader)


async def huge(reader, writer):
    """A frame of 1 GB is announced, and sent as far as anybody takes it."""
    writer.write(UPGRADE)
    await reader.readuntil(b"\r\n\r\n")
    await receive(reader)
    writer.write(b"\x81\xff" + (1 << 30).to_bytes(8, "big") + b"\0\0\0\0")
    ended = asyncio.create_task(wait_for_end(reader))
    try:
        for _ in range(1 << 14):
            writer.write(bytes(1 << 16))
            await writer.drain()
            if ended.done():
                break
    finally:
        await ended


async def record(host, port):
    """An honest Hello, as it was heard on the wire."""
    reader, writer = await asyncio.open_connection(host, port)
    heard = []

    def words(nonce):
        heard.append(hello(JOB, "replayed", nonce, os.environ["ATTACK_TOKEN"]))
        return heard[0]

    assert await knock(reader, writer, words) == "Welcome"
    writer.close()
    return heard[0]


async def one(act, host, port, end):
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return
    tally["tried"] += 1
    try:
        async with asyncio.timeout_at(end):
            await act(reader, writer)
    except TimeoutError:
        pass
    except (OSError, asyncio.IncompleteReadError):
        tally["refused"] += 1
    finally:
        writer.transport.abort()


async def siege(kind, where, seconds, count):
    host, _, port = where.rpartition(":")
    if kind == "replay":
        old = await record(host, port)
    kinds = {
        "idle": idle,
        "half-open": half_open,
        "slow": slow,
        "huge": huge,
        "no-secret": lambda r, w: liar(r, w, lambda nonce: hello(JOB, "n", nonce, "")),
        "wrong-secret": lambda r, w: liar(r, w, lambda nonce: hello(JOB, "n", nonce, "guess")),
        "other-job": lambda r, w: liar(r, w, lambda nonce: hello("other", "n", nonce, "theirs")),
        "replay": lambda r, w: liar(r, w, lambda nonce: old),
    }
    end = asyncio.get_running_loop().time() + seconds
    pause = seconds / 2 / count
    waves = []
    for _ in range(count):  # spread over the first half of the time
        waves.append(asyncio.create_task(one(kinds[kind], host, port, end)))
        await asyncio.sleep(pause)
    await asyncio.wait(waves)


if __name__ == "__main__":
    _, kind, where, seconds, *count = sys.argv
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(10)  # a stranger has a machine of its own
    began = time.time()
    asyncio.run(siege(kind, where, float(seconds), int(count[0]) if count else 100))
    print(json.dumps({**tally, "began": began, "ended": time.time()}))

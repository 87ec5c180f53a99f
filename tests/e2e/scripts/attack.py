"""Does to a coordinator's port what a stranger might: python attack.py KIND HOST:PORT SECONDS [COUNT [SPREAD]]

COUNT connections are made over the first SPREAD seconds, of SECONDS in all.  Prints one JSON line: how many were made,
how many were cut off or refused by the other side, how many were let in.  A `replay` first makes one honest handshake,
with the secret in $ATTACK_TOKEN, and then repeats its words.  `expired` shows the certificate in $ATTACK_CERT, with the
key in $ATTACK_KEY.
"""

import asyncio
import hashlib
import hmac
import json
import os
import resource
import secrets
import ssl
import sys
import time

UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cmlwc3RvcCBiZW5jaCEhIQ==\r\n"
)
JOB = "e2e"
tally = {"tried": 0, "refused": 0, "accepted": 0}


def frame(payload):
    return b"\x81\xfe" + len(payload).to_bytes(2, "big") + b"\0\0\0\0" + payload


def hello(job, challenge, token):
    nonce = secrets.token_hex(16)
    parts = [part.encode() for part in ("agent", job, "stranger", challenge, nonce)]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    proof = hmac.new(token.encode(), b"ripstop" + framed, hashlib.sha256).hexdigest()
    words = {"v": 1, "type": "Hello", "run_id": job, "node": "stranger", "nonce": nonce, "proof": proof}
    return json.dumps(words).encode()


def request(knock):
    """An agent's, with what it says of itself before it was challenged."""
    return UPGRADE + b"Ripstop-Knock: " + knock + b"\r\n\r\n"


async def receive(reader):
    head = await reader.readexactly(2)
    size = head[1] if head[1] < 126 else int.from_bytes(await reader.readexactly(2), "big")
    return json.loads(await reader.readexactly(size))


async def shake(reader, writer, words):
    """A handshake: `words` makes a Hello of the coordinator's nonce, and of none before.  What the answer was."""
    writer.write(request(words("")))
    await reader.readuntil(b"\r\n\r\n")
    answer = await receive(reader)
    if answer["type"] == "Challenge":
        writer.write(frame(words(answer["nonce"])))
        answer = await receive(reader)
    return answer["type"]


async def liar(reader, writer, words):
    answer = await shake(reader, writer, words)
    tally["accepted" if answer == "Welcome" else "refused"] += 1


async def wait_for_end(reader):
    while await reader.read(65536):
        pass
    tally["refused"] += 1


async def idle(reader, writer):
    await wait_for_end(reader)


async def half_open(reader, writer):
    writer.write(UPGRADE)
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
    """A frame of 1 GB is announced, and sent as far as anybody takes it, by one who knows how to knock."""
    writer.write(request(hello(JOB, "", os.environ["ATTACK_TOKEN"])))
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
    """An honest handshake, as it was heard on the wire: what was said to no challenge, and to the one there was."""
    reader, writer = await asyncio.open_connection(host, port)
    heard = {}

    def words(nonce):
        heard[bool(nonce)] = hello(JOB, nonce, os.environ["ATTACK_TOKEN"])
        return heard[bool(nonce)]

    assert await shake(reader, writer, words) == "Welcome"
    writer.close()
    return heard


async def plain(reader, writer):
    """An agent that knows the secret, and nothing of TLS."""
    writer.write(request(hello(JOB, "", os.environ["ATTACK_TOKEN"])))
    await wait_for_end(reader)


def expired():
    """What an agent with such a certificate connects with; whose the other side's is, it does not ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(os.environ["ATTACK_CERT"], os.environ["ATTACK_KEY"])
    return context


async def one(act, host, port, end, tls):
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
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


async def siege(kind, where, seconds, count, spread):
    host, _, port = where.rpartition(":")
    if kind == "replay":
        old = await record(host, port)
    kinds = {
        "idle": idle,
        "half-open": half_open,
        "slow": slow,
        "huge": huge,
        "plain": plain,
        "expired": plain,
        "no-secret": lambda r, w: liar(r, w, lambda nonce: hello(JOB, nonce, "")),
        "wrong-secret": lambda r, w: liar(r, w, lambda nonce: hello(JOB, nonce, "guess")),
        "other-job": lambda r, w: liar(r, w, lambda nonce: hello("other", nonce, "theirs")),
        "replay": lambda r, w: liar(r, w, lambda nonce: old[bool(nonce)]),
    }
    tls = expired() if kind == "expired" else None
    loop = asyncio.get_running_loop()
    began = loop.time()
    waves = []
    for number in range(count):
        waves.append(asyncio.create_task(one(kinds[kind], host, port, began + seconds, tls)))
        await asyncio.sleep(began + (number + 1) * spread / count - loop.time())  # who is late catches up
    await asyncio.wait(waves)


if __name__ == "__main__":
    _, kind, where, seconds, *more = sys.argv
    seconds, count, spread = float(seconds), int([*more, 100][0]), float([*more, 0, 0][1]) or float(seconds) / 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(10)  # a stranger has a machine of its own
    began = time.time()
    asyncio.run(siege(kind, where, seconds, count, spread))
    print(json.dumps({**tally, "began": began, "ended": time.time()}))

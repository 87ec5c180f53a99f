"""Attacks a coordinator's port: python attack.py KIND HOST:PORT SECONDS [COUNT [SPREAD]]

Opens COUNT connections over the first SPREAD of SECONDS seconds.  Prints one JSON line: the connections that were
opened, those that the coordinator rejected or closed, and those that it accepted.  `replay` first makes one valid
handshake, with the secret in $ATTACK_TOKEN, and then repeats its messages.  `expired` uses the certificate in
$ATTACK_CERT, with the key in $ATTACK_KEY.
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
DISCONNECT_TIMEOUT_S = 60  # a busy machine disconnects later
tally = {"tried": 0, "rejected": 0, "accepted": 0}


def frame(payload):
    return b"\x81\xfe" + len(payload).to_bytes(2, "big") + b"\0\0\0\0" + payload


def hello(job, challenge, token):
    nonce = secrets.token_hex(16)
    parts = [part.encode() for part in ("agent", job, "attacker", challenge, nonce)]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    proof = hmac.new(token.encode(), b"ripstop" + framed, hashlib.sha256).hexdigest()
    message = {"v": 1, "type": "Hello", "run_id": job, "node": "attacker", "nonce": nonce, "proof": proof}
    return json.dumps(message).encode()


def request(preauth_hello):
    """An agent's request."""
    return UPGRADE + b"Ripstop-Preauth: " + preauth_hello + b"\r\n\r\n"


async def receive(reader):
    head = await reader.readexactly(2)
    size = head[1] if head[1] < 126 else int.from_bytes(await reader.readexactly(2), "big")
    return json.loads(await reader.readexactly(size))


async def handshake(reader, writer, make_hello):
    """The type of the coordinator's last message.  `make_hello` gets the challenge; empty for pre-authentication."""
    writer.write(request(make_hello("")))
    await reader.readuntil(b"\r\n\r\n")
    reply = await receive(reader)
    if reply["type"] == "Challenge":
        writer.write(frame(make_hello(reply["nonce"])))
        reply = await receive(reader)
    return reply["type"]


async def impostor(reader, writer, make_hello):
    reply = await handshake(reader, writer, make_hello)
    tally["accepted" if reply == "Welcome" else "rejected"] += 1


async def wait_for_end(reader):
    while await reader.read(65536):
        pass
    tally["rejected"] += 1


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
    """Announce a frame of 1 GB after pre-authentication, and send it until the coordinator disconnects."""
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
    """The messages of a valid handshake: False: of pre-authentication, True: to the challenge."""
    reader, writer = await asyncio.open_connection(host, port)
    recorded = {}

    def make_hello(nonce):
        recorded[bool(nonce)] = hello(JOB, nonce, os.environ["ATTACK_TOKEN"])
        return recorded[bool(nonce)]

    assert await handshake(reader, writer, make_hello) == "Welcome"
    writer.close()
    return recorded


async def plain(reader, writer):
    """An agent that has the secret, but does not use TLS."""
    writer.write(request(hello(JOB, "", os.environ["ATTACK_TOKEN"])))
    await wait_for_end(reader)


def expired():
    """The TLS context of an agent with an expired certificate; it does not verify the coordinator's."""
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
        async with asyncio.timeout_at(end + DISCONNECT_TIMEOUT_S):
            await act(reader, writer)
    except TimeoutError:
        pass
    except (OSError, asyncio.IncompleteReadError):
        tally["rejected"] += 1
    finally:
        writer.transport.abort()


async def attack(kind, where, seconds, count, spread):
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
        "no-secret": lambda r, w: impostor(r, w, lambda nonce: hello(JOB, nonce, "")),
        "wrong-secret": lambda r, w: impostor(r, w, lambda nonce: hello(JOB, nonce, "guess")),
        "other-job": lambda r, w: impostor(r, w, lambda nonce: hello("other", nonce, "theirs")),
        "replay": lambda r, w: impostor(r, w, lambda nonce: old[bool(nonce)]),
    }
    tls = expired() if kind == "expired" else None
    loop = asyncio.get_running_loop()
    began = loop.time()
    waves = []
    for number in range(count):
        waves.append(asyncio.create_task(one(kinds[kind], host, port, began + seconds, tls)))
        await asyncio.sleep(began + (number + 1) * spread / count - loop.time())  # catches up after a delay
    await asyncio.wait(waves)


if __name__ == "__main__":
    _, kind, where, seconds, *more = sys.argv
    seconds, count, spread = float(seconds), int([*more, 100][0]), float([*more, 0, 0][1]) or float(seconds) / 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(10)  # a real attacker uses another machine
    began = time.time()
    asyncio.run(attack(kind, where, seconds, count, spread))
    print(json.dumps({**tally, "began": began, "ended": time.time()}))

#!/usr/bin/env python3
"""How long a round of n nodes takes to form, to form again when one is lost, and to resume with a new coordinator.

    python bench/rendezvous_scale.py [--nodes 8,64,256,1000,4000,10000] [--torch 8,64] [--runs 3] [--json F]

The coordinator is a real `ripstop coordinator` process.  The nodes are real connections that speak the real protocol
(handshake, join, heartbeats, reconnects), all in one process, since what is measured is the coordinator.  Beside it, in
the same run, torch's c10d rendezvous handler, one process a node.  Figures are medians:

  form      the first node starts to connect         -> the last one knows its rank in the first round
  re-form   one node's connection is cut             -> the last survivor knows its rank in the next round
  takeover  the coordinator is killed, and a new one starts at its port -> the round goes on with all its nodes
  memory    the coordinator's, after the first round less before the first node, for each node
  idle      the coordinator's share of one core while n nodes send heartbeats and nothing happens

`form cpu` is the coordinator's CPU time for the first round, `form clients` that of the nodes.  On a machine with other
load these are more comparable than the times.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import itertools
import json
import multiprocessing
import os
import random
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from msgspec import to_builtins

from ripstop.model import round
from ripstop.protocol.messages import Join, Ready
from ripstop.protocol.pacing import ask_after_s, heartbeat_interval_s, reconnect_spread_s
from ripstop.telemetry.history import history_interval_s

TOKEN = "bench"
JOB = "scale"
LEASE = 3.0
SLICES = 500
HEARTBEAT = b"\x8a\x80\0\0\0\0"  # a Pong without data, masked with zeros
PING = b"\x89\x80\0\0\0\0"  # a heartbeat that asks for an answer
TIMEOUT_S = 120.0
IDLE = 10.0
AT_ONCE = 256  # handshakes: all nodes share one process, and one that answers late is cut off, as it should be
UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cmlwc3RvcCBiZW5jaCEhIQ==\r\nRipstop-Preauth: %s\r\n\r\n"
)


class Fleet:
    """All the nodes of one job, and when the last of them was told of a round."""

    def __init__(self, size: int, least: int, port: int) -> None:
        self.size, self.least, self.port = size, least, port
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.again: list[asyncio.Task[None]] = []  # connections that were tried again
        self.told: dict[int, int] = {}  # round -> nodes that know their place in it
        self.slices: list[set[Node]] = [set() for _ in range(SLICES)]  # connected nodes, by when they send
        self.nodes = [Node(self, number) for number in range(size)]
        self.interval = heartbeat_interval_s(LEASE, size)
        self.is_restarting = self.is_over = False
        self._waiting: tuple[int, int, asyncio.Future[float]] | None = None

    def assigned(self, number: int) -> None:
        self.told[number] = self.told.get(number, 0) + 1
        if self._waiting and self._waiting[0] == number and self.told[number] == self._waiting[1]:
            self._waiting[2].set_result(time.perf_counter())

    async def send_heartbeats(self) -> None:
        """Evenly over the interval: nodes that started at different times do not beat together."""
        loop = asyncio.get_running_loop()
        every = 1 + int(ask_after_s(LEASE, self.size, is_elected=False) / self.interval)
        for turn in itertools.count():
            began = loop.time()
            for n, nodes in enumerate(self.slices):
                for node in nodes:
                    node.transport.write(PING if (node.number + turn) % every == 0 else HEARTBEAT)
                await asyncio.sleep(max(0.0, began + (n + 1) * self.interval / SLICES - loop.time()))

    async def all_told(self, number: int, count: int) -> float:
        done = asyncio.get_running_loop().create_future()
        self._waiting = (number, count, done)
        return await asyncio.wait_for(done, TIMEOUT_S)


class Node(asyncio.Protocol):
    """One agent as the coordinator sees it: as little as can be, so that it is not what is measured."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number, self.name, self.port = fleet, number, f"node{number}", 20000 + number
        self.slice = fleet.slices[number % SLICES]
        self.place: dict | None = None
        self.tries = 0
        self.welcome = self.is_over = False

    async def connect(self) -> None:
        """As an agent does: again, after a pause, when the coordinator has no time."""
        await self.fleet.gate.acquire()
        self.buffer, self.upgraded = b"", False
        self.tries += 1
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.fleet.port)
        except OSError as error:
            self.connection_lost(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(UPGRADE % encoded("Hello", **self.hello("")))

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_over or self.fleet.is_over:
            return
        if self.welcome and not self.fleet.is_restarting:
            sys.exit(f"the coordinator closed {self.name}'s connection: {error}")
        if self.welcome:
            self.slice.remove(self)
            self.welcome, self.tries = False, 0
        else:
            self.fleet.gate.release()
        delay = min(0.05 * 2**self.tries, 1.0) * random.uniform(0.5, 1.0)
        if self.tries:
            delay += random.uniform(0.0, reconnect_spread_s(self.fleet.size))
        loop = asyncio.get_running_loop()
        loop.call_later(delay, lambda: self.fleet.again.append(loop.create_task(self.connect())))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.upgraded:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if not end:
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self.upgraded, self.buffer = True, rest
        while len(self.buffer) >= 2:
            length, start = self.buffer[1], 2
            if length == 126:
                length, start = int.from_bytes(self.buffer[2:4], "big"), 4
            if len(self.buffer) < start + length:
                return
            text, self.buffer = self.buffer[start : start + length], self.buffer[start + length :]
            if text:  # otherwise a heartbeat
                self.receive(json.loads(text))

    def receive(self, message: dict) -> None:
        match message["type"]:
            case "Challenge":
                self.send("Hello", **self.hello(message["nonce"]))
            case "Welcome":
                node = round.Node(self.name, "127.0.0.1", slots=8)
                newest = self.place["round"] if self.place else 0
                ready = Ready(self.port, after=newest)
                join = to_builtins(Join(node, self.fleet.least, self.fleet.size, newest=newest, ready=ready))
                if self.place:
                    join |= {"held": self.place, "status": "running"}
                self.welcome = True
                self.fleet.gate.release()
                self.send("Join", **join)
                self.slice.add(self)
            case "Assign":
                self.place = place = message["place"]
                if place["group_rank"] == 0:
                    self.send("Ready", store_port=self.port, after=place["round"])
                self.fleet.assigned(place["round"])
            case "Query":
                self.send("Reply", number=message["number"], error="no workers")
            case "StandBy":
                pass
            case _:
                sys.exit(f"{self.name} received {message}")

    def hello(self, challenge: str) -> dict:
        nonce = secrets.token_hex(16)
        parts = [part.encode() for part in ("agent", JOB, self.name, challenge, nonce)]
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        proof = hmac.new(TOKEN.encode(), b"ripstop" + framed, hashlib.sha256).hexdigest()
        return {"run_id": JOB, "node": self.name, "nonce": nonce, "proof": proof}

    def send(self, kind: str, **fields: object) -> None:
        payload = encoded(kind, **fields)
        size = len(payload)
        head = bytes((0x81, 0x80 | size)) if size < 126 else bytes((0x81, 0xFE)) + size.to_bytes(2, "big")
        self.transport.write(head + b"\0\0\0\0" + payload)  # masked with zeros

    def lose(self) -> None:
        self.is_over = True
        self.slice.remove(self)
        self.transport.abort()


def encoded(kind: str, **fields: object) -> bytes:
    return json.dumps({"v": 1, "type": kind, **fields}, separators=(",", ":")).encode()


async def ours(size: int) -> dict[str, float]:
    """One coordinator, `size` nodes: all figures."""
    fleet = Fleet(size, max(1, size - 1), free_port())
    coordinator, log = start(fleet)
    try:
        await written(log, b"coordinator of job=")  # the port is bound long before its owner is ready to answer
        figures = await measure(fleet, coordinator.pid)
        fleet.is_restarting = True
        began = time.perf_counter()
        coordinator.kill()
        coordinator.wait()
        coordinator, log = start(fleet)
        await written(log, b"have rejoined")
        return figures | {"takeover": time.perf_counter() - began}
    finally:
        fleet.is_over = True
        coordinator.kill()
        coordinator.wait()
        for nodes in fleet.slices:
            for node in nodes:
                node.transport.abort()


def start(fleet: Fleet) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    argv = [sys.executable, "-m", "ripstop", "coordinator", f"--rdzv-endpoint=127.0.0.1:{fleet.port}"]
    argv += [f"--rdzv-id={JOB}", f"--nnodes={fleet.least}:{fleet.size}"]
    argv += [f"--rdzv-conf=lease={LEASE},last_call_timeout=60"]
    log = tempfile.TemporaryFile()
    return subprocess.Popen(argv, stderr=log, env={**os.environ, "RIPSTOP_TOKEN": TOKEN}), log


async def measure(fleet: Fleet, pid: int) -> dict[str, float]:
    loop, empty = asyncio.get_running_loop(), memory(pid)
    fleet.heartbeats = loop.create_task(fleet.send_heartbeats())
    began, used, own = time.perf_counter(), cpu(pid), time.process_time()
    formed = loop.create_task(fleet.all_told(1, fleet.size))
    await asyncio.gather(*(node.connect() for node in fleet.nodes))
    figures = {"form": await formed - began, "form cpu": cpu(pid) - used, "form clients": time.process_time() - own}
    figures["memory"] = (memory(pid) - empty) / fleet.size
    used, since = cpu(pid), time.perf_counter()
    # the coordinator takes one sample of its nodes meanwhile
    await asyncio.sleep(max(IDLE, history_interval_s(fleet.size)))
    figures["idle"] = (cpu(pid) - used) / (time.perf_counter() - since)
    again = loop.create_task(fleet.all_told(2, fleet.size - 1))
    began, used = time.perf_counter(), cpu(pid)
    next(node for node in fleet.nodes if node.place["group_rank"] == fleet.size // 2).lose()
    figures["re-form"] = await again - began
    figures["re-form cpu"] = cpu(pid) - used
    return figures


async def written(log: IO[bytes], text: bytes) -> None:
    """Wait for a text in the coordinator's log."""
    end = time.monotonic() + TIMEOUT_S
    while text not in (seen := os.pread(log.fileno(), 1 << 24, 0)):
        assert b"nodes returned" not in seen, "not all nodes were back in time: the round has ended"
        assert time.monotonic() < end, f"no {text!r} in the coordinator's log: {seen[-500:]!r}"
        await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def memory(pid: int) -> float:
    """KiB that are this process's alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return float(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")))


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# torch ----------------------------------------------------------------------------------------------------------------


def torch_node(size: int, port: int, start: multiprocessing.Barrier, ends: multiprocessing.Queue) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    start.wait()
    params = RendezvousParameters("c10d", f"127.0.0.1:{port}", JOB, size, size, local_addr="127.0.0.1")
    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    handler.next_rendezvous()
    ends.put(time.perf_counter())
    time.sleep(TIMEOUT_S)  # nobody goes before all have met


def theirs(size: int) -> float:
    """Seconds until all of torch's nodes have met; every one is a process that has torch imported already."""
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous  # noqa: F401 - before the fork, so it costs nothing

    fork = multiprocessing.get_context("fork")
    start, ends, port = fork.Barrier(size + 1), fork.Queue(), free_port()
    nodes = [fork.Process(target=torch_node, args=(size, port, start, ends), daemon=True) for _ in range(size)]
    for node in nodes:
        node.start()
    start.wait()
    began = time.perf_counter()
    try:
        return max(ends.get(timeout=TIMEOUT_S) for _ in nodes) - began
    finally:
        for node in nodes:
            node.kill()
        for node in nodes:
            node.join()


# the table ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="8,64,256,1000,4000,10000")
    parser.add_argument("--torch", default="8,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"descriptors: {soft}, raised to {hard} for the nodes; the coordinator raises its own", file=sys.stderr)
    sizes, torch_sizes = ([int(n) for n in text.split(",") if n] for text in (options.nodes, options.torch))
    raw: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        row = raw[str(size)] = {}
        for _ in range(options.runs):
            for name, figure in asyncio.run(ours(size)).items():
                row.setdefault(name, []).append(figure)
        if size in torch_sizes:
            row["torch form"] = [theirs(size)]
        print_row(size, row)
    if options.json:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


def print_row(size: int, row: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(figures) for name, figures in row.items()}
    torch = f"{medians['torch form']:9.2f} s" if "torch form" in medians else "          -"
    print(
        f"{size:6} nodes  form {medians['form']:7.3f} s (cpu {medians['form cpu']:.2f} s, clients "
        f"{medians['form clients']:.2f} s)  torch's c10d {torch}  re-form {medians['re-form']:6.3f} s (cpu "
        f"{medians['re-form cpu']:.2f} s)  takeover {medians['takeover']:5.2f} s  memory {medians['memory']:6.1f} "
        f"KiB a node  idle {100 * medians['idle']:5.1f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()

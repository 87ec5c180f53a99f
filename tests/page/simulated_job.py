"""A real coordinator and its port, with simulated nodes that answer its queries: a large job in one process.

    python -m tests.page.simulated_job --nodes 500 --slots 8 --events 0

It prints its port, and runs until its stdin is closed.

Rank 17 is slow, rank 42 is silent.  Every node has one GPU a slot.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ripstop.coordinator.driver import Coordinator, CoordinatorDriverSession
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.config import Budget, Timing
from ripstop.model.event_json import to_json
from ripstop.model.events import AgentMessage, CheckpointSaved, Event, EventRecord, FirstStep, WorkersStarted
from ripstop.model.round import Address, Node, Place
from ripstop.model.usage import GpuSample, NodeSample, RankSample, StepSample
from ripstop.protocol.messages import Assign, Events, FromCoordinator, Join, Query, Ready, Reply
from ripstop.transport.endpoint import bind_endpoint
from ripstop.transport.server import Server

TOKEN = "simulated"
RUN_ID = "simulated"
LEASE_S = 1e6  # the nodes send no heartbeats
STEP_S = 0.4
SLOW_RANK, SILENT_RANK = 17, 42
GIB = 1 << 30


class SimulatedNode:
    """An agent that runs no workers."""

    def __init__(self, coordinator: Coordinator, number: int, slots: int, nodes: int) -> None:
        self._id = f"gpu{number:04}"
        self._slots = slots
        self._seq = 0
        self._place: Place | None = None
        self._began = 0.0
        self._loop = asyncio.get_running_loop()
        self._session: CoordinatorDriverSession = coordinator.attach(self._id, self._receive, lambda: None)
        node = Node(self._id, f"10.0.{number // 250}.{number % 250}", slots)
        self._session.receive(Join(node, nodes, nodes, ready=Ready(29500, 0)))

    def _receive(self, message: FromCoordinator) -> None:
        match message:
            case Assign(place):
                self._place, self._began = place, time.time()
                self._loop.call_soon(self._start, place)
            case Query(number, name, argument):
                self._loop.call_soon(self._answer, number, name, json.loads(argument or "{}"))

    def _start(self, place: Place) -> None:
        pids = tuple(1000 + place.first_rank + local for local in range(self._slots))
        self._record(
            WorkersStarted(
                place.round, place.first_rank, place.world_size, place.restarts, pids, 0.1, 0.0, "simulated"
            ),
            FirstStep(place.round, place.first_rank, 0, 0.2),
            *([CheckpointSaved(place.round, 0, 0, "/checkpoints/0")] if place.first_rank == 0 else []),
        )

    def _record(self, *events: Event) -> None:
        lines = []
        for event in events:
            self._seq += 1
            lines.append(to_json(EventRecord(self._seq, time.time(), self._id, event)))
        self._session.receive(Events(tuple(lines)))

    def _answer(self, number: int, name: str, argument: dict[str, Any]) -> None:
        assert self._place is not None
        step = int((time.time() - self._began) / STEP_S)
        match name:
            case "sample":
                body = to_builtins(self._sample(self._place, step))
            case "step":
                body = to_builtins(StepSample(self._place.round, step, time.time()))
            case _:
                self._session.receive(Reply(number, error=f"a simulated node has no {name}"))
                return
        self._session.receive(Reply(number, json.dumps(body)))

    def _sample(self, place: Place, step: int) -> NodeSample:
        ranks = []
        for rank in range(place.first_rank, place.first_rank + self._slots):
            pace = 2.2 if rank == SLOW_RANK else 1 + (rank * 7919 % 100) / 1000
            age = time.time() - self._began + 60 if rank == SILENT_RANK else 0.1 * (rank % 4)
            memory = 6 * GIB + rank * 7919 % 97 * GIB // 97
            ranks.append(RankSample(rank, 1.0 * step, memory, 12, 3, 10_000, step, 1 / (STEP_S * pace), age, step))
        gpus = tuple(GpuSample(n, 0.9 + n / 100, 70 * GIB, 80 * GIB, 60 + n, 500.0) for n in range(self._slots))
        return NodeSample(time.time(), place.round, 1.0, 1 << 26, tuple(ranks), gpus)


@contextmanager
def simulated(nodes: int, slots: int, events: int = 0) -> Iterator[str]:
    """The address of a job in a process of its own."""
    argv = [sys.executable, "-m", "tests.page.simulated_job", f"--nodes={nodes}", f"--slots={slots}"]
    argv.append(f"--events={events}")
    root = Path(__file__).parents[2]
    with subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


async def run(nodes: int, slots: int, events: int) -> None:
    settings = JobSettings(RUN_ID, nodes, nodes, Timing(lease=LEASE_S), Budget(3))
    coordinator = Coordinator(settings)
    bound = bind_endpoint(Address("127.0.0.1", 0), required=True)
    assert bound is not None
    server = Server(bound.listening, coordinator, token=TOKEN)
    await server.start()
    for number in range(nodes):
        SimulatedNode(coordinator, number, slots, nodes)
    for number in range(events):
        coordinator.journal.record(AgentMessage(f"message {number}"), time.time())
    print(bound.address.port, flush=True)
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    await stdin.read()
    coordinator.stop()
    await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--events", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(run(args.nodes, args.slots, args.events))

"""Queries of torch's flight recorder in real workers, including workers that do not reply."""

import asyncio
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ripstop.diagnostics import flight_recorder_query, stack_parser
from ripstop.diagnostics.flight_recorder_query import HANGING, FlightDump, query_ranks
from ripstop.diagnostics.hang_analysis import describe_hung_collectives, suspects_in_collectives
from ripstop.model.config import Script, StartMethod
from ripstop.workers.processes import Children
from ripstop.workers.spawner import ProcessSpec, Spawner
from ripstop.workers.zygote.worker_hooks import install_worker_recorder_hook, worker_hook_recorder_dump
from tests.e2e.harness import wait_until

DEADLINE = 120.0
WORKER = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist

rank, store, kind = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
data = torch.ones(3, 4)
dist.all_reduce(data)
print("threads", threading.active_count(), "ready", flush=True)
if rank == 0:
    dist.all_reduce(data)
elif kind == "sleep":
    time.sleep(1000)
elif kind == "lock":
    ctypes.PyDLL(None).sleep(1000)  # with Python's lock in hand
"""


async def query(sockets: list[str]) -> list[FlightDump]:
    found = await query_ranks(sockets, range(len(sockets)), HANGING)
    return [dump for dump in found if dump is not None]


def with_workers(
    stage: Any,
    script: Callable[[list[str]], Coroutine[Any, Any, None]],
    *args: str,
    code: str = WORKER,
    start: StartMethod = StartMethod.ZYGOTE,
) -> None:
    """Two workers and their sockets; the workers end with the script."""
    sockets = [str(stage.directory / f"s{rank}") for rank in range(2)]
    outs = [stage.directory / f"{rank}.out" for rank in range(2)]

    async def scenario() -> None:
        entry = Script(str(stage.script(code)), (str(stage.directory / "store"), *args))
        children = Children().open()
        spawner = Spawner(children, entry, stage.env, start, None)
        pids: list[int] = []
        try:
            specs = [
                ProcessSpec(stage.env | {"RANK": str(rank)}, entry, outs[rank], recorder=sockets[rank])
                for rank in range(2)
            ]
            pids = await spawner.spawn(specs)
            ready = [lambda out=out: "ready" in out.read_text() or None for out in outs]
            for one in ready:
                await asyncio.to_thread(wait_until, one)
            async with asyncio.timeout(DEADLINE):
                await script(sockets)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                children.reap(pid)
            spawner.close()
            children.close()

    asyncio.run(scenario())
    assert all("threads 1 ready" in out.read_text() for out in outs if code == WORKER)  # ours is not counted


async def until(sockets: list[str], fits: Callable[[list[FlightDump]], bool]) -> list[FlightDump]:
    """The dumps, once the workers have reached their collectives."""
    while not fits(found := await query(sockets)):
        pass  # each query waits for a reply
    return found


def progress(found: list[FlightDump]) -> dict[int, Any]:
    return {rank: one.collectives for rank, one in enumerate(found) if one.collectives is not None}


def test_the_dumps_show_which_rank_waits_and_which_is_behind(stage) -> None:
    async def script(sockets: list[str]) -> None:
        found = await until(sockets, lambda found: "#2" in found[0].text)
        assert suspects_in_collectives(progress(found)) == {1}
        assert describe_hung_collectives(progress(found)) == (
            "rank 0 is in all_reduce #2, not entered by rank 1 (last: all_reduce #1)"
        )
        assert found[0].text.splitlines() == [
            "all_reduce #1, 12 Float: completed",
            "all_reduce #2, 12 Float: scheduled",
        ]
        for _ in range(20):  # a client that disconnects must not break the worker
            with socket.socket(socket.AF_UNIX) as hasty:
                hasty.connect(sockets[0])
        await until(sockets, lambda again: again[0].collectives == found[0].collectives)

    with_workers(stage, script, "sleep")


def test_a_rank_that_holds_pythons_lock_is_left_out_after_the_timeout(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(sockets: list[str]) -> None:
        (first,) = await until(sockets[:1], lambda found: "#2" in found[0].text)
        monkeypatch.setattr(flight_recorder_query, "REPLY_TIMEOUT_S", 0.3)
        found = await until(sockets, lambda found: found[0].collectives is not None and found[1].collectives is None)
        assert found[1] == FlightDump(why="the worker did not reply within 0.3 s")
        assert found[0] == first

    with_workers(stage, script, "lock")


@pytest.mark.parametrize("start", [StartMethod.ZYGOTE, StartMethod.EXEC])
def test_a_worker_without_torch_has_no_recorder_thread(stage, start: StartMethod) -> None:
    async def script(sockets: list[str]) -> None:
        assert {one.why for one in await query(sockets)} == {
            "the worker has no socket: it was not forked with torch loaded (--start-method, --preload)"
        }

    code = "import os, time; print('ready', len(os.listdir('/proc/self/task')), flush=True); time.sleep(1000)"
    with_workers(stage, script, code=code, start=start)
    assert "ready 1" in (stage.directory / "0.out").read_text()


def test_the_recorder_of_nccl_is_not_read_from_a_healthy_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        _dump_fr_trace_json = staticmethod(lambda: b"1")
        _dump_nccl_trace_json = staticmethod(lambda: b"2")

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", Torch)
    assert worker_hook_recorder_dump(is_hanging=False) == b'{"fr": 1}'
    assert worker_hook_recorder_dump(is_hanging=True) == b'{"fr": 1, "nccl": 2}'


# invalid replies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"nonsense", "the worker's reply is not a dump of torch's flight recorder"),
        (b"", "the worker's reply is not a dump of torch's flight recorder"),
        (b" " * 3000, "the dump has more than 0 MiB; set a smaller TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_an_invalid_reply_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: bytes, why: str) -> None:
    monkeypatch.setattr(flight_recorder_query, "MAX_DUMP_BYTES", 2000)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def serve() -> None:
            asking, _ = server.accept()
            with asking:
                asking.recv(1)
                asking.sendall(reply)

        serving = threading.Thread(target=serve)
        serving.start()
        assert asyncio.run(query([str(tmp_path / "s")])) == [FlightDump(why=why)]
        serving.join()


def test_a_worker_that_has_ended_cannot_be_queried(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
    (found,) = asyncio.run(query([str(tmp_path / "s")]))
    assert found.collectives is None and "refused" in found.why


def test_the_recorders_own_thread_is_recognised_in_stacks() -> None:
    assert re.search(stack_parser._RIPSTOP, install_worker_recorder_hook.__code__.co_filename)

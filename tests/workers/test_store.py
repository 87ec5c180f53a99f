"""The port of a round's store, and its process."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from ripstop.model.config import Executable, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.workers.group import Exit, Group
from ripstop.workers.processes import Children
from ripstop.workers.spawner import ProcessSpec, Spawner
from ripstop.workers.store import RoundStore
from tests.worker_fixtures import new_spawner

DEADLINE = 180.0

CLIENT = """
import datetime, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=150))
store.set(sys.argv[2], "here")
print(store.get(sys.argv[3]).decode())
"""


def shown_as(pid: int) -> list[str]:
    return [Path(f"/proc/{pid}/{name}").read_text().rstrip("\n\0") for name in ("comm", "cmdline")]


async def client(port: int, mine: str, other: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", CLIENT, str(port), mine, other, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().strip()


@pytest.mark.parametrize("preload", [("torch.distributed",), ()])
def test_clients_share_values_through_the_store(stage, preload):
    script = stage.script("")

    async def scenario() -> None:
        with new_spawner(Script(str(script)), stage.env, StartMethod.ZYGOTE, preload) as spawner:
            store = RoundStore("127.0.0.1")
            try:
                async with asyncio.timeout(DEADLINE):
                    await spawner.wait_ready()
                    store.serve(spawner, stage.env, spawner.children)
                    assert (
                        await asyncio.gather(client(store.port, "a", "b"), client(store.port, "b", "a")) == ["here"] * 2
                    )
                    pid = store._pid
                    assert pid is not None
                    assert os.getsid(pid) == pid
                    assert shown_as(pid) == ["ripstop-store"] * 2  # no second script in `ps`
                    await store.close()
                    with pytest.raises(ProcessLookupError):
                        os.kill(pid, 0)
                    RoundStore("127.0.0.1", store.port)._close_socket()  # the port is free again
            finally:
                await store.close()

    asyncio.run(scenario())


def test_workers_rendezvous_again_after_one_is_killed(stage):
    script = stage.script("""
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
if os.environ["ROUND"] == "3":
    dist.destroy_process_group()
elif os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(600)
""")
    entry = Script(str(script))

    async def a_round(number: int, spawner: Spawner, children: Children) -> dict[int, int | None]:
        exits: dict[int, int | None] = {}
        over = asyncio.Event()

        def on_exit(end: Exit) -> None:
            exits[end.local_rank] = end.exitcode
            if end.exitcode != 0 or len(exits) == 2:
                over.set()

        store = RoundStore("127.0.0.1")
        store.serve(spawner, stage.env, children)
        env = {
            **stage.env,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
            "ROUND": str(number),
        }
        group = Group(children, spawner, [ProcessSpec({**env, "RANK": str(rank)}, entry) for rank in range(2)], on_exit)
        try:
            await group.start()
            await over.wait()
        finally:
            await asyncio.gather(group.stop(0), store.close())
        return exits

    async def scenario() -> None:
        with new_spawner(entry, stage.env, StartMethod.ZYGOTE, None) as spawner:
            async with asyncio.timeout(DEADLINE):
                ready = await spawner.wait_ready()
                assert ready.start is StartMethod.ZYGOTE, ready.fallback_reason
                assert "torch._dynamo" in ready.preloaded
                rounds = [await a_round(number, spawner, spawner.children) for number in range(4)]
        assert rounds == [{0: None, 1: None}] * 3 + [{0: 0, 1: 0}]

    asyncio.run(scenario())


def test_a_prepared_store_runs_before_its_round_and_is_replaced_if_it_dies_until_then(stage):
    script = stage.script("")

    async def scenario() -> None:
        with new_spawner(Script(str(script)), stage.env, StartMethod.ZYGOTE, ("torch.distributed",)) as spawner:
            stores = [RoundStore("127.0.0.1") for _ in range(2)]
            try:
                async with asyncio.timeout(DEADLINE):
                    for store in stores:
                        store.prepare(spawner, stage.env, spawner.children)
                        assert store._start is not None
                        await store._start
                    kept, lost = (store._pid for store in stores)
                    assert kept is not None and lost is not None
                    os.kill(lost, signal.SIGKILL)
                    await stores[1]._has_ended.wait()
                    for store in stores:
                        store.serve(spawner, stage.env, spawner.children)
                        clients = client(store.port, "a", "b"), client(store.port, "b", "a")
                        assert await asyncio.gather(*clients) == ["here"] * 2
                        assert store._socket is None  # only the store's process listens
                    assert stores[0]._pid == kept
                    assert stores[1]._pid not in (None, lost)
            finally:
                for store in stores:
                    await store.close()

    asyncio.run(scenario())


def test_a_store_without_clients_has_no_process(stage):
    async def scenario() -> None:
        with new_spawner(Executable(("true",)), stage.env, StartMethod.EXEC) as spawner:
            store = RoundStore("localhost")
            try:
                await spawner.wait_ready()
                store.serve(spawner, stage.env, spawner.children)
                await asyncio.sleep(0)
                assert store._pid is None
            finally:
                await store.close()

    asyncio.run(scenario())


def test_without_torch_clients_are_refused_and_the_reason_is_printed(stage, capfd):
    stage.script("raise ImportError('not for this machine')", "torch.py")
    env = {**stage.env, "PYTHONPATH": str(stage.directory)}

    async def scenario() -> None:
        with new_spawner(Executable(("true",)), env, StartMethod.EXEC) as spawner:
            store = RoundStore("127.0.0.1")
            try:
                await spawner.wait_ready()
                store.serve(spawner, env, spawner.children)
                async with asyncio.timeout(DEADLINE):
                    reader, writer = await asyncio.open_connection("127.0.0.1", store.port)
                    with pytest.raises(ConnectionResetError):
                        await reader.readexactly(1)
                    writer.close()
                    with pytest.raises(ConnectionRefusedError):
                        await asyncio.open_connection("127.0.0.1", store.port)
            finally:
                await store.close()

    asyncio.run(scenario())
    assert capfd.readouterr().err == (
        "ripstop: the job's store needs torch, which cannot be imported: not for this machine; "
        f"install torch for {sys.executable}.\n"
    )


def test_a_store_that_died_refuses_its_clients(stage):
    script = stage.script("")

    async def scenario() -> None:
        with new_spawner(Script(str(script)), stage.env, StartMethod.ZYGOTE, ("torch",)) as spawner:
            store = RoundStore("127.0.0.1")
            try:
                async with asyncio.timeout(DEADLINE):
                    await spawner.wait_ready()
                    store.serve(spawner, stage.env, spawner.children)
                    assert await client(store.port, "a", "a") == "here"
                    assert store._pid is not None
                    os.kill(store._pid, signal.SIGKILL)
                    await store._has_ended.wait()
                    with pytest.raises(ConnectionRefusedError):
                        await asyncio.open_connection("127.0.0.1", store.port)
            finally:
                await store.close()

    asyncio.run(scenario())


def test_a_port_in_use_is_a_start_error(stage):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose"):
            RoundStore("127.0.0.1", port)


def test_a_host_that_does_not_resolve_is_a_start_error():
    with pytest.raises(StartError, match=r"'no\.such\.host\.invalid' cannot be resolved"):
        RoundStore("no.such.host.invalid")


def test_an_address_of_another_machine_is_served_on_all_interfaces():
    # Behind an address translation the public address is not a local one.
    async def scenario() -> None:
        store = RoundStore("192.0.2.7")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", store.port)
            writer.close()
        finally:
            await store.close()

    asyncio.run(scenario())


def test_a_store_listens_on_ipv6():
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")

    async def scenario() -> None:
        store = RoundStore("::1")
        try:
            _, writer = await asyncio.open_connection("::1", store.port)
            writer.close()
        finally:
            await store.close()

    asyncio.run(scenario())


def bind_next(port: int, *options: int) -> socket.socket:
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        server.bind(("0.0.0.0", port))
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.parametrize("options", [(socket.SO_REUSEADDR, socket.SO_REUSEPORT), (socket.SO_REUSEADDR,)])
def test_the_next_port_is_reserved_for_a_server_in_rank_0_until_the_round_ends(options):
    """A server like gRPC's, and one like torch's TCPStore."""

    async def scenario() -> None:
        store = RoundStore("127.0.0.1")
        with pytest.raises(OSError):
            bind_next(store.port + 1)
        with bind_next(store.port + 1, *options) as server:
            server.listen()
            for _ in range(8):  # no connection goes to the socket that reserves the port
                with socket.create_connection(("127.0.0.1", store.port + 1), DEADLINE):
                    server.accept()[0].close()
        await store.close()
        bind_next(store.port + 1, socket.SO_REUSEADDR).close()

    asyncio.run(scenario())


def test_a_fixed_port_is_used_although_the_next_one_is_taken():
    async def scenario() -> None:
        free = RoundStore("127.0.0.1")
        await free.close()
        with bind_next(free.port + 1):
            store = RoundStore("127.0.0.1", free.port)
            assert store.port == free.port
            await store.close()

    asyncio.run(scenario())

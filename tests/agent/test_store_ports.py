"""The stores of a node's rounds, one after the other."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ripstop.agent.store_ports import StorePorts
from ripstop.model.config import Executable, StartMethod
from ripstop.model.round import Address, Place
from tests.worker_fixtures import Stage, new_spawner

DEADLINE = 120.0
HOST = "127.0.0.1"


def place(round: int, port: int) -> Place:
    return Place(round, 0, 1, 0, 2, 2, 0, 2, Address(HOST, port), 0)


def test_with_a_fixed_port_each_of_two_new_rounds_waits_until_the_last_store_has_ended(stage: Stage) -> None:
    async def scenario() -> None:
        tasks: list[asyncio.Task[None]] = []

        def run_task(work: Coroutine[None, None, None]) -> Any:
            tasks.append(asyncio.ensure_future(work))

        ports: list[int] = []
        with new_spawner(Executable(("true",)), stage.env, StartMethod.EXEC) as spawner:
            stores = StorePorts(stage.env, spawner.children, run_task, lambda _, port: ports.append(port))
            stores.open(HOST, 0, is_required=True)
            port = ports[0]
            stores.start(place(1, port))
            stores.serve(place(1, port), spawner)
            old = stores._store
            assert old is not None
            old._has_ended.clear()  # as with a process that takes a while to end
            last = stores.take(place(2, port))
            second = asyncio.create_task(stores.replace(last, place(2, port), 5.0))
            await asyncio.sleep(0)
            last = stores.take(place(3, port))
            third = asyncio.create_task(stores.replace(last, place(3, port), 5.0))
            done, _ = await asyncio.wait([second, third], timeout=0.05)
            assert not done, "the port is not free yet"
            old._has_ended.set()
            async with asyncio.timeout(DEADLINE):
                await asyncio.gather(second, third)
                stores.serve(place(3, port), spawner)  # raises if the port is taken
                await stores.close()
                await asyncio.gather(*tasks)

    asyncio.run(scenario())

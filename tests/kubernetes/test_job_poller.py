"""Who is spoken to about a running job, and in which order."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ripstop.kubernetes import job_poller
from ripstop.kubernetes.job_poller import MAX_FAILED_POLLS, POLL_INTERVAL_S, JobPoller, PolledJobApi
from ripstop.kubernetes.manifests import Owner

OWNER = Owner("train", "ml", "u-1")
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Pods(PolledJobApi):
    """The coordinator is at `coordinator_at`; everybody who is shown the token is noted."""

    def __init__(self, coordinator_at: str = "") -> None:
        self.coordinator_at = coordinator_at
        self.shown: list[str] = []

    def status(self, address: str, token: str, run_id: str) -> dict[str, Any]:
        self.shown.append(address)
        if address != self.coordinator_at:
            raise ConnectionRefusedError("nobody there")
        return {"round": 7, "target": 4}

    def scale(self, address: str, token: str, run_id: str, nodes: int) -> None:
        self.shown.append(f"{address} {nodes}")


def with_a(api: Pods, talk: Callable[[JobPoller], Awaitable[None]]) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            await talk(JobPoller(api, threads, OWNER, "token", lambda: None))

    asyncio.run(main())


async def looked(talk: JobPoller, addresses: list[str], size: int | None = None, *, at: float) -> None:
    """The job was looked at, and all was said."""
    before = asyncio.all_tasks()
    talk.poll(addresses, size, at)
    await asyncio.gather(*asyncio.all_tasks() - before)


def test_a_job_is_sent_its_size_where_it_answered() -> None:
    api = Pods(coordinator_at=B)

    async def talk(to: JobPoller) -> None:
        await looked(to, [A, B], at=0.0)
        await looked(to, [A, B], 3, at=1.0)
        assert to.telemetry == {"round": 7, "target": 3}

    with_a(api, talk)
    assert api.shown == [A, B, f"{B} 3"]


def test_an_address_that_the_job_has_no_more_is_not_shown_its_token() -> None:
    api = Pods(coordinator_at=B)

    async def talk(to: JobPoller) -> None:
        await looked(to, [B], at=0.0)
        await looked(to, [A], 3, at=1.0)
        await looked(to, [A], 3, at=POLL_INTERVAL_S)

    with_a(api, talk)
    assert api.shown == [B, A]


def test_a_coordinator_behind_pods_that_hang_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_poller, "SEARCH_TIMEOUT_S", 0.0)  # as if each of them had hung
    api = Pods(coordinator_at=C)

    async def talk(to: JobPoller) -> None:
        for time in range(4):
            await looked(to, [A, B, C], at=time * POLL_INTERVAL_S)
        assert to.telemetry["round"] == 7

    with_a(api, talk)
    assert api.shown == [A, B, C, C]


def test_a_job_is_unreachable_when_it_did_not_answer_for_long() -> None:
    async def talk(to: JobPoller) -> None:
        for time in range(MAX_FAILED_POLLS):
            assert to.unreachable == ""
            await looked(to, [A], at=time * POLL_INTERVAL_S)
        assert to.unreachable == f"{A}: nobody there"

    with_a(Pods(), talk)

"""Queries to an agent, with workers and without."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ripstop.agent.query_handler import QUERIES, QueriedWorkers, QueryHandler
from ripstop.agent.usage_sampler import GpuUsageSampler
from ripstop.diagnostics.progress import WorkerProgress
from ripstop.logs import log_reader
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import ConfiguredStreams, Logs, OutputStreams
from ripstop.model.errors import QueryFailed
from ripstop.model.round import Address, Place
from ripstop.model.usage import GpuSample

PLACE = Place(2, 0, 1, 4, 6, 2, 0, 2, Address("127.0.0.1", 1), 0)
ONE = (GpuSample(0, memory_used=7),)


def ask(query: str, workers: QueriedWorkers | None = None, **details: object) -> Any:
    return json.loads(
        asyncio.run(QueryHandler(lambda: workers, GpuUsageSampler(lambda: ONE)).reply(query, json.dumps(details)))
    )


@pytest.mark.parametrize("query", sorted(set(QUERIES) - {"sample"}))
def test_a_query_about_workers_fails_without_workers(query: str) -> None:
    with pytest.raises(QueryFailed, match="no workers run on this node now"):
        ask(query)


def test_a_node_without_workers_can_be_sampled() -> None:
    sample = ask("sample")
    assert (sample["ranks"], sample["gpus"][0]["memory_used"]) == ([], 7)


def test_a_step_query_works_only_for_a_worker_that_reports_steps(tmp_path: Path) -> None:
    logs = RoundLogs(tmp_path, Logs(tmp_path), PLACE, "default", terminal=False)
    workers = QueriedWorkers(PLACE, (1, 2), logs, {1: WorkerProgress(7, 1.0, None, None, 100.0, commit_age=2.5)})
    before = time.time()
    seen = ask("step", workers, rank=5)
    assert (seen["round"], seen["step"], seen["commit_age"]) == (2, 7, 2.5)
    assert before - 100.0 <= seen["at"] <= time.time() - 100.0
    with pytest.raises(QueryFailed, match="rank 4 reports no steps now"):
        ask("step", workers, rank=4)


def test_an_unknown_query_is_an_error_that_lists_the_known_queries() -> None:
    with pytest.raises(QueryFailed, match="'meaning'; it has log, sample, stacks, step, workers"):
        ask("meaning")


def test_after_an_older_rounds_log_follows_the_current_rounds(tmp_path: Path) -> None:
    logs = RoundLogs(
        tmp_path, Logs(tmp_path, redirects=ConfiguredStreams(OutputStreams.ALL)), PLACE, "default", terminal=False
    )
    logs.prepare()
    before = tmp_path / "round_1" / "5" / "stdout.log"
    before.parent.mkdir(parents=True)
    before.write_text("one\n")
    (tmp_path / "round_2" / "5" / "stdout.log").write_text("two\n")
    workers = QueriedWorkers(PLACE, (1, 2), logs, {})
    first = ask("log", workers, rank=5, stream="stdout", round=1, offset=0)
    second = ask("log", workers, rank=5, stream="stdout", round=1, offset=first["next"])
    assert [(piece["round"], piece["text"]) for piece in (first, second)] == [(1, "one\n"), (2, "two\n")]
    assert ask("log", workers, rank=5, stream="stderr", round=1, offset=9)["round"] == 2


def test_of_stopped_workers_only_the_log_can_be_read_and_it_has_an_end(tmp_path: Path) -> None:
    logs = RoundLogs(
        tmp_path, Logs(tmp_path, redirects=ConfiguredStreams(OutputStreams.ALL)), PLACE, "default", terminal=False
    )
    logs.prepare()
    path = tmp_path / "round_2" / "5" / "stdout.log"
    path.write_bytes(b"x" * log_reader.MAX_CHUNK_BYTES + b"the end \xe2")

    async def scenario() -> None:
        stopped = asyncio.get_running_loop().create_future()
        workers = QueriedWorkers(PLACE, (1, 2), logs, {}, stopped=stopped)
        handler = QueryHandler(lambda: workers, GpuUsageSampler(lambda: ONE))

        async def log(offset: int, **more: object) -> Any:
            details = {"rank": 5, "stream": "stdout", "round": 2, "offset": offset, "reader": "r"} | more
            return json.loads(await handler.reply("log", json.dumps(details)))

        assert [(await log(at))["end"] for at in (0, log_reader.MAX_CHUNK_BYTES)] == [False, False]
        waiting = asyncio.create_task(log(log_reader.MAX_CHUNK_BYTES + 8, wait=60.0))
        leaving = asyncio.create_task(handler.log_followers.wait(120))
        done, _ = await asyncio.wait([waiting, leaving], timeout=0.05)
        assert not done
        stopped.set_result(None)
        async with asyncio.timeout(120):
            piece = await waiting
            await leaving
        assert (piece["text"], piece["end"]) == ("\ufffd", True)
        assert not (await log(0))["end"]
        with pytest.raises(QueryFailed, match="no workers of round 3 or a later one"):
            await log(0, round=3)
        for query in ("stacks", "step", "workers"):
            with pytest.raises(QueryFailed, match="no workers run on this node now"):
                await handler.reply(query, "{}")
        assert json.loads(await handler.reply("sample", "{}"))["ranks"] == []

    asyncio.run(scenario())


def test_the_older_log_of_a_rank_that_is_now_on_another_node_can_be_read(tmp_path: Path) -> None:
    logs = RoundLogs(
        tmp_path, Logs(tmp_path, redirects=ConfiguredStreams(OutputStreams.ALL)), PLACE, "default", terminal=False
    )
    logs.prepare()
    before = tmp_path / "round_1" / "0" / "stdout.log"
    before.parent.mkdir(parents=True)
    before.write_text("one\n")
    workers = QueriedWorkers(PLACE, (1, 2), logs, {})
    assert ask("log", workers, rank=0, stream="stdout", round=1, offset=0)["text"] == "one\n"
    with pytest.raises(QueryFailed, match="rank 0 is not on this node, which has ranks 4 to 5"):
        ask("log", workers, rank=0, stream="stdout", round=1, offset=4)

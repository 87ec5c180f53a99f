"""Answers operators' queries to an agent: one function per query, with a JSON object as argument and as result.

A query changes nothing, and no error in one disturbs training: every error becomes a `QueryFailed`, which the operator
receives.  Modules that most agents never need are imported by the first query.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins

from ripstop.agent.log_followers import LogFollowers
from ripstop.diagnostics.progress import WorkerProgress
from ripstop.diagnostics.stack_dump import dump_stacks, stack_dump_of_ended_process
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import OutputStreams
from ripstop.model.errors import QueryFailed
from ripstop.model.round import Place
from ripstop.model.usage import StandbySample
from ripstop.protocol.messages import Query, Reply
from ripstop.system.blocking_calls import run_in_daemon_thread

if TYPE_CHECKING:
    from ripstop.agent.usage_sampler import GpuUsageSampler
    from ripstop.diagnostics.flight_recorder_query import FlightDump

log = logging.getLogger("ripstop.agent")

MAX_OPEN_QUERIES = 64
MAX_REPLY_CHARS = 240 * 1024  # as JSON within the JSON of a message
MAX_ERROR_CHARS = 4096
MAX_WAIT_S = 8.0  # of a query that waits for new log output


class QueriedWorkers(Struct, frozen=True):
    """The workers of this node, as queries see them; `pids` by local rank.

    `stopped` is done when no process of theirs is left: their logs are complete then.
    """

    place: Place
    pids: tuple[int, ...]
    logs: RoundLogs
    progress: Mapping[int, WorkerProgress]  # of the workers that report, by local rank
    ended: frozenset[int] = frozenset()  # local ranks whose pids may be reused
    recorder_sockets: tuple[str, ...] = ()  # by local rank
    stopped: asyncio.Future[None] | None = None

    @property
    def all_stopped(self) -> bool:
        return self.stopped is not None and self.stopped.done()

    def local_rank(self, rank: int) -> int:
        """The local rank of a worker of this node."""
        local = rank - self.place.first_rank
        if not 0 <= local < self.place.slots:
            last = self.place.first_rank + self.place.slots - 1
            raise QueryFailed(f"rank {rank} is not on this node, which has ranks {self.place.first_rank} to {last}")
        return local


class QueryHandler:
    """Answers the queries to one agent; `find_workers` returns the workers that run, or ran last."""

    def __init__(
        self,
        find_workers: Callable[[], QueriedWorkers | None],
        gpus: "GpuUsageSampler | None" = None,
        find_standbys: Callable[[], tuple[StandbySample, ...]] = tuple,
    ) -> None:
        self.find_workers = find_workers
        self.find_standbys = find_standbys
        self._gpus = gpus
        self._open_queries = 0
        self.log_followers = LogFollowers()

    @property
    def gpus(self) -> "GpuUsageSampler":
        from ripstop.agent.usage_sampler import GpuUsageSampler

        self._gpus = self._gpus or GpuUsageSampler()
        return self._gpus

    def running_workers(self) -> QueriedWorkers:
        workers = self.find_workers()
        if workers is None or workers.all_stopped:
            raise QueryFailed("no workers run on this node now")
        return workers

    async def answer(self, query: Query) -> Reply:
        self._open_queries += 1
        try:
            if self._open_queries > MAX_OPEN_QUERIES:
                raise QueryFailed(f"this node is already answering {MAX_OPEN_QUERIES} queries; try again later")
            return Reply(query.number, await self.reply(query.name, query.argument))
        except QueryFailed as why:
            return Reply(query.number, error=str(why)[:MAX_ERROR_CHARS])
        finally:
            self._open_queries -= 1

    async def reply(self, name: str, argument: str) -> str:
        """The reply as JSON, or QueryFailed."""
        if name not in QUERIES:
            raise QueryFailed(f"this agent has no query {name!r}; it has {', '.join(sorted(QUERIES))}")
        try:
            details = json.loads(argument or "{}")
            if not isinstance(details, dict):
                raise QueryFailed(f"the argument of a query must be a JSON object, received {argument[:80]!r}")
            text = json.dumps(await QUERIES[name](self, details))
        except QueryFailed:
            raise
        except TimeoutError as error:
            raise QueryFailed(f"query {name!r} timed out: a file server hangs, or the machine is overloaded") from error
        except Exception as defect:
            log.exception("query %s", name)
            raise QueryFailed(f"query {name!r} failed: {defect}") from defect
        if (size := len(json.dumps(text))) > MAX_REPLY_CHARS:
            raise QueryFailed(f"a reply has at most {MAX_REPLY_CHARS} characters, this one has {size}; ask for less")
        return text


def _query_reply_fields(record: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = to_builtins(record)
    return fields


async def _answer_stacks_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    """The stacks of one `rank`, or of all workers of this node."""
    from ripstop.diagnostics.flight_recorder_query import HEALTHY, query_ranks

    workers = handler.running_workers()
    rank = details.get("rank")
    if rank is not None and type(rank) is not int:
        raise QueryFailed(f"rank must be an integer, received {str(rank)[:80]!r}")
    chosen = range(workers.place.slots) if rank is None else [workers.local_rank(rank)]
    running = [local for local in chosen if local not in workers.ended]
    found, flights = await asyncio.gather(
        dump_stacks((workers.pids[local], workers.logs.stack_file(local)) for local in running),
        query_ranks(workers.recorder_sockets, running, HEALTHY),
    )
    stacks = {local: stack_dump_of_ended_process(workers.pids[local]) for local in workers.ended}
    stacks |= zip(running, found, strict=True)
    recorded = {local: _flight_recorder_reply(flight) for local, flight in zip(running, flights, strict=True) if flight}
    max_chars = MAX_REPLY_CHARS // 3 // len(chosen)  # JSON needs more characters than the text has
    return {
        "ranks": [
            {
                "rank": workers.place.first_rank + local,
                "pid": stack.pid,
                "stack": stack.stack[:max_chars],
                "wchan": stack.wchan,
                "state": stack.state,
                "source": stack.source,
            }
            | recorded.get(local, {})
            for local, stack in sorted(stacks.items())
            if local in chosen
        ]
    }


def _flight_recorder_reply(flight: "FlightDump") -> dict[str, Any]:
    """The content of a worker's flight recorder, or why it is empty."""
    if not flight.collectives:
        return {"recorder": f"none: {flight.why or 'nothing is recorded; NCCL is recorded only where a worker hangs'}"}
    return {"collectives": [_query_reply_fields(progress) for progress in flight.collectives]}


async def _answer_workers_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    workers = handler.running_workers()
    return {"round": workers.place.round, "pids": workers.pids}


async def _answer_step_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of the worker of this `rank`: a `StepSample`."""
    from ripstop.model.usage import StepSample

    workers, rank = handler.running_workers(), int(details["rank"])
    progress = workers.progress.get(workers.local_rank(rank))
    if progress is None or progress.step is None or progress.step_age is None:
        raise QueryFailed(f"rank {rank} reports no steps now")
    at = time.time() - progress.step_age
    return _query_reply_fields(StepSample(workers.place.round, progress.step, at, progress.commit_age))


async def _answer_log_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of a worker's log.  The agent does not end before a client named as `reader` has read the whole log."""
    client = details.get("reader")
    if client is None:
        return await _read_log_for_query(handler, details)
    handler.log_followers.on_query(str(client))
    is_last = False
    try:
        piece = await _read_log_for_query(handler, details)
        is_last = piece["end"]
        return piece
    except QueryFailed:
        is_last = True
        raise
    finally:
        handler.log_followers.on_reply(str(client), is_last=is_last)


async def _read_log_for_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    """The log of `round` from `offset`, or the last `tail` lines of the current round's log.

    After the end of an older round's log, the reply is the start of the current round's.  At the end of the current log
    the reply waits up to `wait` seconds for more output.  `end` is true if the log is complete.
    """
    from ripstop.logs import log_reader

    workers = handler.find_workers()
    if workers is None:
        raise QueryFailed("no workers run on this node now")
    rank, current = int(details["rank"]), workers.place.round
    stream = OutputStreams.OUT if details["stream"] == "stdout" else OutputStreams.ERR
    round, offset = int(details.get("round", current)), int(details.get("offset", 0))
    wait = float(details.get("wait", 0.0))
    if round > current:
        raise QueryFailed(f"no workers of round {round} or a later one run on this node now")
    if round < current:
        older = await run_in_daemon_thread(partial(workers.logs.earlier, round, rank, stream))
        if older is not None:
            piece = await run_in_daemon_thread(partial(log_reader.read_log_chunk, older, offset, finished=True))
            if piece.text:
                return {"round": round, "end": False} | _query_reply_fields(piece)
        offset = 0
    path = await _log_file_for_query(workers, rank, stream)
    finished = workers.all_stopped  # before the read: nothing is written after it
    until = None
    if "tail" in details:
        offset, until = await run_in_daemon_thread(partial(log_reader.find_last_lines, path, int(details["tail"])))
    piece = await run_in_daemon_thread(partial(log_reader.read_log_chunk, path, offset, until, finished=finished))
    if wait and not piece.text and not finished:
        await log_reader.wait_for_larger_log(path, piece.size, min(wait, MAX_WAIT_S), workers.stopped)
        finished = workers.all_stopped
        piece = await run_in_daemon_thread(partial(log_reader.read_log_chunk, path, offset, finished=finished))
    return {"round": current, "end": finished and piece.next >= piece.size} | _query_reply_fields(piece)


async def _log_file_for_query(workers: QueriedWorkers, rank: int, stream: OutputStreams) -> Path:
    local = workers.local_rank(rank)
    path = workers.logs.stdout(local) if stream is OutputStreams.OUT else workers.logs.stderr(local)
    name = "stdout" if stream is OutputStreams.OUT else "stderr"
    if path is None:
        raise QueryFailed(
            f"rank {rank}'s {name} goes only to its node's console; start the job with --tee=3 or --redirects=3"
        )
    if not await run_in_daemon_thread(path.is_file):
        raise QueryFailed(f"rank {rank}'s {name} goes to {path}, which is not a readable file")
    return path


async def _answer_sample_query(handler: QueryHandler, details: Mapping[str, Any]) -> dict[str, Any]:
    """What this node and its workers use now: a `NodeSample`."""
    from ripstop.agent.usage_sampler import sample

    gpus, workers = await handler.gpus.sample(), handler.find_workers()
    running = None if workers is None or workers.all_stopped else workers
    return _query_reply_fields(await run_in_daemon_thread(partial(sample, running, gpus, handler.find_standbys())))


QUERIES: dict[str, Callable[[QueryHandler, Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
    "log": _answer_log_query,
    "sample": _answer_sample_query,
    "stacks": _answer_stacks_query,
    "step": _answer_step_query,
    "workers": _answer_workers_query,
}

"""What operators may ask of an agent: one function a question, each a JSON object in and out.

Answers change nothing.  A question that cannot be answered is a `QueryFailed`; whatever else goes wrong is one too,
since
nobody's training may be disturbed by a question.
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

from ripstop.diagnostics.progress import WorkerProgress
from ripstop.diagnostics.stack_dump import dump_stacks, ended_process
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import OutputStreams
from ripstop.model.errors import QueryFailed
from ripstop.model.round import Place
from ripstop.system.blocking_calls import run_in_daemon_thread

if TYPE_CHECKING:
    from ripstop.agent.gpu_usage import GpuUsageReader
    from ripstop.agent.log_followers import LogFollowers
    from ripstop.diagnostics.flight_dump import FlightDump

log = logging.getLogger("ripstop.agent")

LARGEST = 240 * 1024  # characters of an answer, as JSON within the JSON of a message
LONGEST_WAIT = 8.0  # seconds, for an answer that waits for something to happen


class Workers(Struct, frozen=True):
    """The workers of this node, as questions see them; `pids` by local rank.

    `stopped` is done once nothing of theirs is left: what they have written by then is all.
    """

    place: Place
    pids: tuple[int, ...]
    logs: RoundLogs
    progress: Mapping[int, WorkerProgress]  # of those that report, by local rank
    ended: frozenset[int] = frozenset()  # local ranks whose pids may be others' now
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


class QueriedNode(Struct, frozen=True):
    """What questions are about; `workers` are those that run, or ran last."""

    gpus: "GpuUsageReader"
    workers: Workers | None
    readers: "LogFollowers"

    @property
    def present(self) -> Workers | None:
        """The workers that run now."""
        return None if self.workers is None or self.workers.all_stopped else self.workers

    def running(self) -> Workers:
        """The same, for a question that is about them."""
        if (workers := self.present) is None:
            raise QueryFailed("no workers run on this node now")
        return workers


def _plain(record: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = to_builtins(record)
    return fields


async def _stacks(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    """Where the workers are: of one `rank`, or of all of this node's."""
    from ripstop.diagnostics.flight_dump import HEALTHY, query_ranks  # nobody may ever ask

    workers = node.running()
    rank = details.get("rank")
    if rank is not None and type(rank) is not int:
        raise QueryFailed(f"a rank is a whole number, received {str(rank)[:80]!r}")
    chosen = range(workers.place.slots) if rank is None else [workers.local_rank(rank)]
    there = [local for local in chosen if local not in workers.ended]
    found, flights = await asyncio.gather(
        dump_stacks((workers.pids[local], workers.logs.stack_file(local)) for local in there),
        query_ranks(workers.recorder_sockets, there, HEALTHY),
    )
    looks = dict(zip(there, found, strict=True)) | {
        local: ended_process(workers.pids[local]) for local in workers.ended
    }
    told = {local: _told(flight) for local, flight in zip(there, flights, strict=True) if flight}
    room = LARGEST // 3 // len(chosen)  # JSON needs more characters than the text has
    return {
        "ranks": [
            {
                "rank": workers.place.first_rank + local,
                "pid": look.pid,
                "stack": look.stack[:room],
                "wchan": look.wchan,
                "state": look.state,
                "source": look.source,
            }
            | told.get(local, {})
            for local in chosen
            for look in [looks[local]]
        ]
    }


def _told(flight: "FlightDump") -> dict[str, Any]:
    """What torch's flight recorder has of a worker, or why nothing is known."""
    if not flight.standings:
        return {"recorder": f"none: {flight.why or 'nothing is recorded; of NCCL, only where a worker hangs'}"}
    return {"standings": [_plain(standing) for standing in flight.standings]}


async def _workers(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    workers = node.running()
    return {"round": workers.place.round, "pids": workers.pids}


async def _step(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    """How far the worker of this `rank` has come: a `StepSample`."""
    from ripstop.model.usage import StepSample  # nobody may ever ask

    workers, rank = node.running(), int(details["rank"])
    pace = workers.progress.get(workers.local_rank(rank))
    if pace is None or pace.step is None:
        raise QueryFailed(f"rank {rank} reports no steps now")
    return _plain(StepSample(workers.place.round, pace.step, time.time() - pace.age))


async def _log(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of a worker's log; a `reader` that is named wants all there will be, and is not left before it has it."""
    reader = details.get("reader")
    if reader is None:
        return await _piece(node, details)
    node.readers.ask(str(reader))
    last = False
    try:
        piece = await _piece(node, details)
        last = piece["end"]
        return piece
    except QueryFailed:
        last = True
        raise
    finally:
        node.readers.answer(str(reader), last=last)


async def _piece(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    """From `offset` in the log of `round`, or the last `tail` lines of the present one.

    A round that is over is read to its end, and then the present one from its beginning.  At the end of that, the
    answer waits for more, up to `wait` seconds.  With `end`, there will never be more.
    """
    from ripstop.logs import follow  # nobody may ever ask

    workers = node.workers
    if workers is None:
        raise QueryFailed("no workers run on this node now")
    rank, now = int(details["rank"]), workers.place.round
    stream = OutputStreams.OUT if details["stream"] == "stdout" else OutputStreams.ERR
    round, offset, wait = int(details.get("round", now)), int(details.get("offset", 0)), float(details.get("wait", 0.0))
    if round > now:
        raise QueryFailed(f"no workers of round {round} or a later one run on this node now")
    if round < now:
        before = await run_in_daemon_thread(partial(workers.logs.earlier, round, rank, stream))
        if before is not None:
            piece = await run_in_daemon_thread(partial(follow.read, before, offset, finished=True))
            if piece.text:
                return {"round": round, "end": False} | _plain(piece)
        offset = 0
    path = await _log_file(workers, rank, stream)
    if "tail" in details:
        offset = await run_in_daemon_thread(partial(follow.last_lines, path, int(details["tail"])))
    finished = workers.all_stopped  # before it is read: after that, nothing is written
    piece = await run_in_daemon_thread(partial(follow.read, path, offset, finished=finished))
    if wait and not piece.text and not finished:
        await follow.grown(path, piece.size, min(wait, LONGEST_WAIT), workers.stopped)
        finished = workers.all_stopped
        piece = await run_in_daemon_thread(partial(follow.read, path, offset, finished=finished))
    return {"round": now, "end": finished and piece.next >= piece.size} | _plain(piece)


async def _log_file(workers: Workers, rank: int, stream: OutputStreams) -> Path:
    local = workers.local_rank(rank)
    path = workers.logs.stdout(local) if stream is OutputStreams.OUT else workers.logs.stderr(local)
    name = "stdout" if stream is OutputStreams.OUT else "stderr"
    if path is None:
        raise QueryFailed(
            f"rank {rank}'s {name} goes to its node's console alone; start the job with --tee=3 or --redirects=3"
        )
    if not await run_in_daemon_thread(path.is_file):
        raise QueryFailed(f"rank {rank}'s {name} goes to {path}, where nothing can be read")
    return path


async def _sample(node: QueriedNode, details: Mapping[str, Any]) -> dict[str, Any]:
    """What this node and its workers use now: a `NodeSample`."""
    from ripstop.agent import usage  # only where somebody asks

    gpus = await node.gpus.sample()
    if (workers := node.present) is None:
        return _plain(usage.sample(None, (), None, {}, gpus))
    place, pids, logs, progress = (workers.place, workers.pids, workers.logs, workers.progress)
    return _plain(await run_in_daemon_thread(partial(usage.sample, place, pids, logs, progress, gpus)))


QUESTIONS: dict[str, Callable[[QueriedNode, Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
    "log": _log,
    "sample": _sample,
    "stacks": _stacks,
    "step": _step,
    "workers": _workers,
}


async def reply(question: str, argument: str, node: QueriedNode) -> str:
    """The answer as JSON."""
    if question not in QUESTIONS:
        raise QueryFailed(f"this agent cannot answer {question!r}; it answers {', '.join(sorted(QUESTIONS))}")
    try:
        details = json.loads(argument or "{}")
        if not isinstance(details, dict):
            raise QueryFailed(f"the details of a question are a JSON object, received {argument[:80]!r}")
        text = json.dumps(await QUESTIONS[question](node, details))
    except QueryFailed:
        raise
    except TimeoutError as error:
        raise QueryFailed(f"{question!r} takes too long: a file server hangs, or the machine is overloaded") from error
    except Exception as defect:
        log.exception("question %s", question)
        raise QueryFailed(f"{question!r} went wrong: {defect}") from defect
    if (size := len(json.dumps(text))) > LARGEST:
        raise QueryFailed(f"an answer has {LARGEST} characters at most, this has {size}; ask for less")
    return text

"""What operators may ask of an agent: one function a question, each a JSON object in and out.

Answers change nothing.  A question that cannot be answered is a `NoAnswer`; whatever else goes wrong is one too, since
nobody's training may be disturbed by a question.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ripstop.errors import NoAnswer
from ripstop.observe.progress import Pace
from ripstop.round import Place
from ripstop.workers.logs import RoundLogs
from ripstop.workers.look import aside
from ripstop.workers.stacks import gone, look_at, stack_file

log = logging.getLogger("ripstop.agent")

LARGEST = 240 * 1024  # characters of an answer, as JSON within the JSON of a message
LONGEST_WAIT = 8.0  # seconds, for an answer that waits for something to happen


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of this node, as questions see them; `pids` by local rank."""

    place: Place
    pids: tuple[int, ...]
    logs: RoundLogs
    progress: Mapping[int, Pace]  # of those that report, by local rank
    ended: frozenset[int] = frozenset()  # local ranks whose pids may be others' now

    def local_rank(self, rank: int) -> int:
        """The local rank of a worker of this node."""
        local = rank - self.place.first_rank
        if not 0 <= local < self.place.slots:
            last = self.place.first_rank + self.place.slots - 1
            raise NoAnswer(f"rank {rank} is not on this node, which has ranks {self.place.first_rank} to {last}")
        return local


Question = Callable[[Workers, Mapping[str, Any]], Awaitable[dict[str, Any]]]


async def stacks(workers: Workers, details: Mapping[str, Any]) -> dict[str, Any]:
    """Where the workers are: of one `rank`, or of all of this node's."""
    rank = details.get("rank")
    if rank is not None and type(rank) is not int:
        raise NoAnswer(f"a rank is a whole number, received {str(rank)[:80]!r}")
    chosen = range(workers.place.slots) if rank is None else [workers.local_rank(rank)]
    there = [local for local in chosen if local not in workers.ended]
    found = await look_at((workers.pids[local], stack_file(workers.logs.directory(local))) for local in there)
    looks = dict(zip(there, found, strict=True)) | {local: gone(workers.pids[local]) for local in workers.ended}
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
            for local in chosen
            for look in [looks[local]]
        ]
    }


async def _workers(workers: Workers, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"round": workers.place.round, "pids": workers.pids}


async def _log(workers: Workers, details: Mapping[str, Any]) -> dict[str, Any]:
    """A piece of a worker's log: from `offset` in the log of `round`, or the last `tail` lines of the present one.

    A round that is over is read to its end, and then the present one from its beginning.  At the end of that, the
    answer waits for more, up to `wait` seconds.
    """
    from ripstop.workers import tail  # nobody may ever ask

    rank, stream, now = int(details["rank"]), str(details["stream"]), workers.place.round
    path = await _log_file(workers, rank, stream)
    round, offset, wait = int(details.get("round", now)), int(details.get("offset", 0)), float(details.get("wait", 0.0))
    if round < now:
        before = path.parent.parent.parent / f"round_{round}" / str(rank) / path.name
        if await aside(before.is_file):
            piece = await aside(partial(tail.read, before, offset))
            if piece.text:
                return {"round": round} | asdict(piece)
        offset = 0
    if "tail" in details:
        offset = await aside(partial(tail.last_lines, path, int(details["tail"])))
    piece = await aside(partial(tail.read, path, offset))
    if wait and not piece.text:
        await tail.grown(path, piece.size, min(wait, LONGEST_WAIT))
        piece = await aside(partial(tail.read, path, offset))
    return {"round": now} | asdict(piece)


async def _log_file(workers: Workers, rank: int, stream: str) -> Path:
    local = workers.local_rank(rank)
    path = workers.logs.stdout(local) if stream == "stdout" else workers.logs.stderr(local)
    if path is None:
        raise NoAnswer(
            f"rank {rank}'s {stream} goes to its node's console alone; start the job with --tee=3 or --redirects=3"
        )
    if not await aside(path.is_file):
        raise NoAnswer(f"rank {rank}'s {stream} goes to {path}, where nothing can be read")
    return path


QUESTIONS: dict[str, Question] = {"log": _log, "stacks": stacks, "workers": _workers}


async def answer(question: str, argument: str, workers: Workers | None) -> str:
    """The answer as JSON."""
    asked: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
    if question in WHENEVER:
        asked = partial(WHENEVER[question], workers)
    elif question not in QUESTIONS:
        known = ", ".join(sorted([*QUESTIONS, *WHENEVER]))
        raise NoAnswer(f"this agent cannot answer {question!r}; it answers {known}")
    elif workers is None:
        raise NoAnswer("no workers run on this node now")
    else:
        asked = partial(QUESTIONS[question], workers)
    try:
        details = json.loads(argument or "{}")
        if not isinstance(details, dict):
            raise NoAnswer(f"the details of a question are a JSON object, received {argument[:80]!r}")
        text = json.dumps(await asked(details))
    except NoAnswer:
        raise
    except TimeoutError as error:
        raise NoAnswer(f"{question!r} takes too long: a file server hangs, or the machine is overloaded") from error
    except Exception as defect:
        log.exception("question %s", question)
        raise NoAnswer(f"{question!r} went wrong: {defect}") from defect
    if (size := len(json.dumps(text))) > LARGEST:
        raise NoAnswer(f"an answer has {LARGEST} characters at most, this has {size}; ask for less")
    return text


# also when no workers run ---------------------------------------------------------------------------------------------

Whenever = Callable[[Workers | None, Mapping[str, Any]], Awaitable[dict[str, Any]]]

_gpus: Any = None  # `Gpus`, once somebody asks


async def sample(workers: Workers | None, _: Mapping[str, Any]) -> dict[str, Any]:
    """What this node and its workers use now: a `NodeSample`."""
    from ripstop.workers import samples  # here and below: only where somebody asks
    from ripstop.workers.gpus import Gpus

    global _gpus
    _gpus = _gpus or Gpus()
    found = await _gpus.sample()
    place, pids, logs = (workers.place, workers.pids, workers.logs) if workers else (None, (), None)
    progress = workers.progress if workers else {}
    return asdict(await aside(partial(samples.sample, place, pids, logs, progress, found)))


WHENEVER: dict[str, Whenever] = {"sample": sample}

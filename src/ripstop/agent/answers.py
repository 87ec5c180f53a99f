"""What operators may ask of an agent: one function a question, each a JSON object in and out.

Answers change nothing.  A question that cannot be answered is a `NoAnswer`; whatever else goes wrong is one too, since
nobody's training may be disturbed by a question.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ripstop.errors import NoAnswer
from ripstop.observe.progress import Pace
from ripstop.round import Place
from ripstop.workers.logs import RoundLogs
from ripstop.workers.stacks import look_at, stack_file

log = logging.getLogger("ripstop.agent")

LARGEST = 192 * 1024  # characters of an answer


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of this node, as questions see them; `pids` by local rank."""

    place: Place
    pids: tuple[int, ...]
    logs: RoundLogs
    progress: Mapping[int, Pace]  # of those that report, by local rank

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
    looks = await look_at((workers.pids[local], stack_file(workers.logs.directory(local))) for local in chosen)
    room = LARGEST // 2 // len(looks)  # JSON needs more characters than the text has
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
            for local, look in zip(chosen, looks, strict=True)
        ]
    }


QUESTIONS: dict[str, Question] = {"stacks": stacks}


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
    except Exception as defect:
        log.exception("question %s", question)
        raise NoAnswer(f"{question!r} went wrong: {defect}") from defect
    if len(text) > LARGEST:
        raise NoAnswer(f"an answer has {LARGEST} characters at most, this has {len(text)}; ask for less")
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
    if workers is None:
        return asdict(await asyncio.to_thread(samples.sample, None, (), None, {}, found))
    here = workers.place, workers.pids, workers.logs, workers.progress
    return asdict(await asyncio.to_thread(samples.sample, *here, found))


WHENEVER: dict[str, Whenever] = {"sample": sample}

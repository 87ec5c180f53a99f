"""What operators may ask of an agent: one function a question, each a JSON object in and out.

Answers change nothing.  A question that cannot be answered is a `NoAnswer`; whatever else goes wrong is one too, since
nobody's training may be disturbed by a question.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ripstop.errors import NoAnswer
from ripstop.round import Place
from ripstop.workers.logs import RoundLogs

log = logging.getLogger("ripstop.agent")

LARGEST = 192 * 1024  # characters of an answer


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of this node, as questions see them; `pids` by local rank."""

    place: Place
    pids: tuple[int, ...]
    logs: RoundLogs

    def local_rank(self, rank: int) -> int:
        """The local rank of a worker of this node."""
        local = rank - self.place.first_rank
        if not 0 <= local < self.place.slots:
            last = self.place.first_rank + self.place.slots - 1
            raise NoAnswer(f"rank {rank} is not on this node, which has ranks {self.place.first_rank} to {last}")
        return local


Question = Callable[[Workers, Mapping[str, Any]], Awaitable[dict[str, Any]]]

QUESTIONS: dict[str, Question] = {}


async def answer(question: str, argument: str, workers: Workers | None) -> str:
    """The answer as JSON."""
    asked = QUESTIONS.get(question)
    if asked is None:
        raise NoAnswer(f"this agent cannot answer {question!r}; it answers {', '.join(sorted(QUESTIONS)) or 'nothing'}")
    if workers is None:
        raise NoAnswer("no workers run on this node now")
    try:
        details = json.loads(argument or "{}")
        if not isinstance(details, dict):
            raise NoAnswer(f"the details of a question are a JSON object, received {argument[:80]!r}")
        text = json.dumps(await asked(workers, details))
    except NoAnswer:
        raise
    except Exception as defect:
        log.exception("question %s", question)
        raise NoAnswer(f"{question!r} went wrong: {defect}") from defect
    if len(text) > LARGEST:
        raise NoAnswer(f"an answer has {LARGEST} characters at most, this has {len(text)}; ask for less")
    return text

"""What is said to one running job, and what it says, beside the care of its pods.

Rules:

1.  Only an address that a pod of the job has, as its pods were just read, is spoken to: whoever has it afterwards would
    be shown the job's token.
2.  Nobody waits for a job.  It is spoken to in a task, by threads that serve nothing else, of one thing at a time.
3.  It is with a job that runs.  When the job does not, the conversation is over, and a later one knows nothing of it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from ripstop.kubernetes.job_api import JobApi
from ripstop.kubernetes.manifests import Owner, run_id
from ripstop.kubernetes.spec import Json

TELEMETRY = 10.0  # seconds: a running job is asked so often
LOOKING = 5.0  # seconds in which the coordinator is looked for among its pods
LONG = 3  # times that it did not answer

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ripstop.operator")


class JobPoller:
    """With one job; `changed` is called when `telemetry` or `unreachable` have changed, or a size is yet to be told."""

    def __init__(self, api: JobApi, threads: Executor, owner: Owner, token: str, changed: Callable[[], None]) -> None:
        self._api = api
        self._threads = threads
        self._secret = token, run_id(owner)
        self._name = f"job={owner.namespace}/{owner.name}"
        self._changed = changed
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False  # there was a size to tell while it was spoken to
        self._asked = -math.inf
        self._tried = ""  # the address that was asked last
        self._silences = 0  # times in a row that it did not answer
        self._silence = ""  # and why
        self.telemetry: Json = {}

    @property
    def unreachable(self) -> str:
        """Why the job has not answered for long."""
        return self._silence if self._silences >= LONG else ""

    def go_on(self, addresses: Sequence[str], size: int | None, now: float) -> None:
        """Tell the job its size, if there is one to tell, and hear how it is doing when it is time."""
        if self._task is not None and not self._task.done():
            self._interrupted = self._interrupted or size is not None
            return
        if self._seat not in addresses:  # rule 1
            size = None
        due = now - self._asked >= TELEMETRY
        if due:
            self._asked = now
        if due or size is not None:
            self._interrupted = False
            self._task = asyncio.create_task(self._speak(addresses, size, due), name=f"speaks to {self._name}")

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def _seat(self) -> str:
        """Where it answered last."""
        return self._tried if self._silences == 0 else ""

    async def _speak(self, addresses: Sequence[str], size: int | None, due: bool) -> None:
        known = self.unreachable, self.telemetry
        told = size is None or await self._tell(size)
        if due or not told:
            await self._listen(addresses)
        if self._interrupted or (self.unreachable, self.telemetry) != known:
            self._changed()

    async def _tell(self, size: int) -> bool:
        try:
            await self._call(self._api.scale, self._seat, *self._secret, size)
        except Exception as error:  # it is told again when it has been heard
            log.warning("%s could not be told that %d nodes are to train: %s", self._name, size, error)
            return False
        self.telemetry = {**self.telemetry, "target": size}
        log.info("%s was told that %d nodes are to train", self._name, size)
        return True

    async def _listen(self, addresses: Sequence[str]) -> None:
        """Hear how the job is doing, at whichever of these addresses answers."""
        began, why = time.monotonic(), "no pod that could be its coordinator runs"
        for address in self._in_turn(addresses):
            self._tried = address
            try:
                self.telemetry = await self._call(self._api.status, address, *self._secret)
                self._silences = 0
                return
            except Exception as error:  # whatever it is: the job goes on without
                why = f"{address}: {error}"
            if time.monotonic() - began >= LOOKING:
                break
        self._silences, self._silence = self._silences + 1, why
        log.debug("%s says nothing: %s", self._name, why)

    def _in_turn(self, addresses: Sequence[str]) -> list[str]:
        """First where it answered; else those behind the last one tried, which may have hung like all before it."""
        if self._tried not in addresses:
            return list(addresses)
        first = addresses.index(self._tried) + (not self._seat)
        return [*addresses[first:], *addresses[:first]]

    async def _call(self, function: Callable[P, T], *words: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *words, **options))

"""Reads a job for `ripstop top` in two threads: one follows its events, one reads its state, every second and when an
event changes it.

The screen never waits for the job: it shows the latest view.  After a lost connection the job is looked for again,
because its coordinator may have moved.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ripstop.cli.event_stream import follow_events, render_streamed_event, streamed_event_identity
from ripstop.cli.job_client import JobClient
from ripstop.cli.top.job_view import JobView, RankState, job_view
from ripstop.model.errors import RipstopError

READ_INTERVAL_S = 1.0
RETRY_S = 1.0
MAX_EVENTS = 200
MAX_SEEN = 20_000  # twice what a coordinator keeps
MAX_ROUNDS = 20


class JobReader:
    """The latest view of a job."""

    def __init__(self, find_job: Callable[[], JobClient]) -> None:
        self._find_job = find_job
        self.job = find_job()
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._rounds: deque[str] = deque(maxlen=MAX_ROUNDS)
        self._seen: dict[tuple[str, int, float], None] = {}  # events, also of earlier coordinators
        self._flags: dict[int, RankState] = {}
        self._outcome = ""
        self._status = self.job.get("/status")
        self._usage: dict[str, Any] | None = None
        self._problem = ""
        self.version = 0  # grows with every change

    def start(self) -> None:
        for target in (self._follow, self._read):
            threading.Thread(target=target, daemon=True).start()

    def view(self) -> JobView:
        with self._lock:
            more = {"problem": self._problem, "outcome": self._outcome}
            lists = {"rounds": tuple(self._rounds), "events": tuple(self._events)}
            return job_view(self._status, self._usage, dict(self._flags), **more, **lists)

    def _follow(self) -> None:
        while not self._outcome:
            try:
                for event in follow_events(self.job, 0):
                    with self._lock:
                        self._take(event)
                    self._changed.set()
            except RipstopError:
                pass  # the other thread reports it
            time.sleep(RETRY_S)

    def _read(self) -> None:
        while not self._outcome:
            self._changed.clear()
            try:
                status, usage = self.job.get("/status"), self.job.get("/usage")
                with self._lock:
                    self._status, self._usage, self._problem = status, usage, ""
            except RipstopError as error:
                with self._lock:
                    self._problem = str(error)
                self._look_again()
            self.version += 1
            self._changed.wait(READ_INTERVAL_S)

    def _look_again(self) -> None:
        try:
            self.job = self._find_job()
        except RipstopError:
            time.sleep(RETRY_S)

    def _take(self, event: dict[str, Any]) -> None:
        key = streamed_event_identity(event)
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if event["kind"] != "checkpoint_saved" and (line := render_streamed_event(event)):  # the header has its age
            self._events.append(line.lstrip().partition(" ")[2])  # without the number
        match event["kind"]:
            case "round_formed":
                self._flags.clear()
                size = f"{len(event['nodes'])} nodes, {event['world_size']} ranks"
                self._rounds.append(f"{event['round']:>5}  {size}: {event['why']}")
            case "worker_failed":
                self._flags[event["rank"]] = RankState.FAILED
            case "worker_hangs":
                self._flags[event["rank"]] = RankState.HANGS
            case "job_closed" if not event["node"]:
                self._outcome = f"{event['outcome']}: {event['why']}"
        self.version += 1

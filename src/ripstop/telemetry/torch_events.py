"""What one agent saw, as events of torch's agent: for handlers that know those.  Pure.

An event is a text of JSON: `name`, `source` (AGENT or WORKER), `timestamp` in milliseconds and `metadata`, with torch's
keys.  The names are `torchelastic.worker.status.` and a state.  A worker starts (START) and ends (SUCCEEDED, FAILED, or
TERMINATED: stopped by the agent) in every round it was in; the agent ends once (SUCCEEDED or FAILED).
A timer that was missed is `timer expired`.
"""

import json
from typing import Any

from ripstop.model.events import (
    AgentEnded,
    EventRecord,
    TimersMissed,
    WorkerFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)

MISSED = "timer expired"


class TorchEvents:
    """Of one agent; entries come in their order."""

    def __init__(self, *, run_id: str, role: str, backend: str, host: str, program: str) -> None:
        self._facts = {"run_id": run_id, "role": role, "rdzv_backend": backend, "hostname": host}
        self._program = program
        self._began: float | None = None
        self._started: WorkersStarted | None = None
        self._live: dict[int, int] = {}  # pids of workers that have not ended, by rank

    def of(self, entry: EventRecord) -> list[str]:
        """The events that torch's agent would record of this."""
        if self._began is None:
            self._began = entry.at
        match entry.event:
            case WorkersStarted(first_rank=first, pids=pids) as started:
                self._started = started
                self._live = {first + local_rank: pid for local_rank, pid in enumerate(pids)}
                return [self._worker(entry, "START", rank) for rank in self._live]
            case WorkerFailed(round, rank, _, why) if self._started and self._started.round == round:
                event = self._worker(entry, "FAILED", rank, why)
                self._live.pop(rank, None)
                return [event]
            case WorkersSucceeded():
                return self._all(entry, "SUCCEEDED")
            case WorkersStopped():
                return self._all(entry, "TERMINATED")
            case TimersMissed(_, rank, pid, why):
                about = {"watchdog_event": MISSED, "worker_pid": str(pid)}
                return [self._event(entry, "RUNNING", about, name=MISSED, raw_error=why, global_rank=rank)]
            case AgentEnded(code, why):
                return [self._event(entry, "FAILED" if code else "SUCCEEDED", raw_error=why if code else None)]
        return []

    def _all(self, entry: EventRecord, state: str) -> list[str]:
        """All that have not ended do so now."""
        events = [self._worker(entry, state, rank) for rank in self._live]
        self._live = {}
        return events

    def _worker(self, entry: EventRecord, state: str, rank: int, why: str | None = None) -> str:
        assert self._started is not None, "it is one of those that were started"
        pid = self._live.get(rank)
        details = {
            "local_rank": [rank - self._started.first_rank],
            "role_rank": [None],
            "role_world_size": [None],
            "exit_code": [None],
            "worker_pid": [pid],
        }
        return self._event(entry, state, details, source="WORKER", raw_error=why, global_rank=rank, worker_id=str(pid))

    def _event(self, entry: EventRecord, state: str, details: dict[str, Any] | None = None, **facts: Any) -> str:
        assert self._began is not None, "this is an entry"
        source, name = facts.pop("source", "AGENT"), facts.pop("name", f"torchelastic.worker.status.{state}")
        about = {"group_world_size": None, "entry_point": self._program} | (details or {})
        metadata = {
            "global_rank": None,
            "group_rank": None,
            "worker_id": None,
            "state": state,
            "total_run_time": int(entry.at - self._began),
            "raw_error": None,
            "metadata": json.dumps(about),
            "agent_restarts": self._started.restarts if self._started else 0,
            "duration_ms": None,
        }
        event = {"name": name, "source": source, "timestamp": int(entry.at * 1000)}
        return json.dumps(event | {"metadata": self._facts | metadata | facts})

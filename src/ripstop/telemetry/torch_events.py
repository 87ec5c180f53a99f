"""Converts the event records of one agent to events in the format of torch's agent.  Pure.

An event is JSON text: `name`, `source` (AGENT or WORKER), `timestamp` in milliseconds and `metadata` with torch's keys.
Names are `torchelastic.worker.status.` and a state.  A worker has a START and an end (SUCCEEDED, FAILED, or TERMINATED:
stopped by the agent) in every round; the agent ends once (SUCCEEDED or FAILED).  An expired timer is `timer expired`.
"""

import json
from typing import Any

from ripstop.model import events
from ripstop.model.events import EventRecord

TIMER_EXPIRED = "timer expired"


class TorchEvents:
    """The events of one agent; `convert` takes its records in order."""

    def __init__(self, *, run_id: str, role: str, backend: str, host: str, program: str) -> None:
        self._facts = {"run_id": run_id, "role": role, "rdzv_backend": backend, "hostname": host}
        self._program = program
        self._began: float | None = None
        self._started: events.WorkersStarted | None = None
        self._live: dict[int, int] = {}  # pids of workers that have not ended, by rank

    def convert(self, record: EventRecord) -> list[str]:
        """The events that torch's agent would record."""
        if self._began is None:
            self._began = record.at
        match record.event:
            case events.WorkersStarted(first_rank=first, pids=pids) as started:
                self._started = started
                self._live = {first + local_rank: pid for local_rank, pid in enumerate(pids)}
                return [self._worker(record, "START", rank) for rank in self._live]
            case events.WorkerFailed(round, rank, _, why) if self._started and self._started.round == round:
                event = self._worker(record, "FAILED", rank, why)
                self._live.pop(rank, None)
                return [event]
            case events.WorkersSucceeded():
                return self._end_all(record, "SUCCEEDED")
            case events.WorkersStopped():
                return self._end_all(record, "TERMINATED")
            case events.TimersMissed(_, rank, pid, why):
                about = {"watchdog_event": TIMER_EXPIRED, "worker_pid": str(pid)}
                return [self._event(record, "RUNNING", about, name=TIMER_EXPIRED, raw_error=why, global_rank=rank)]
            case events.AgentEnded(code, why):
                return [self._event(record, "FAILED" if code else "SUCCEEDED", raw_error=why if code else None)]
        return []

    def _end_all(self, record: EventRecord, state: str) -> list[str]:
        """All live workers end now."""
        events = [self._worker(record, state, rank) for rank in self._live]
        self._live = {}
        return events

    def _worker(self, record: EventRecord, state: str, rank: int, why: str | None = None) -> str:
        assert self._started is not None, "only started workers have events"
        pid = self._live.get(rank)
        details = {
            "local_rank": [rank - self._started.first_rank],
            "role_rank": [None],
            "role_world_size": [None],
            "exit_code": [None],
            "worker_pid": [pid],
        }
        return self._event(record, state, details, source="WORKER", raw_error=why, global_rank=rank, worker_id=str(pid))

    def _event(self, record: EventRecord, state: str, details: dict[str, Any] | None = None, **facts: Any) -> str:
        assert self._began is not None, "set by the first record"
        source, name = facts.pop("source", "AGENT"), facts.pop("name", f"torchelastic.worker.status.{state}")
        about = {"group_world_size": None, "entry_point": self._program} | (details or {})
        metadata = {
            "global_rank": None,
            "group_rank": None,
            "worker_id": None,
            "state": state,
            "total_run_time": int(record.at - self._began),
            "raw_error": None,
            "metadata": json.dumps(about),
            "agent_restarts": self._started.restarts if self._started else 0,
            "duration_ms": None,
        }
        event = {"name": name, "source": source, "timestamp": int(record.at * 1000)}
        return json.dumps(event | {"metadata": self._facts | metadata | facts})

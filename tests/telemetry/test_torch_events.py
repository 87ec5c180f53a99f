"""Event records of an agent, in the format of torch's handlers."""

import json
from typing import Any

import pytest

from ripstop.model.events import (
    AgentEnded,
    Event,
    EventRecord,
    TimersMissed,
    WarmedUp,
    WorkerFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from ripstop.telemetry.torch_events import TorchEvents

STARTED = WorkersStarted(1, 4, 8, 2, (70, 71), 0.1, 0.0, "first round")


def converted(*events: Event) -> list[dict[str, Any]]:
    """One second apart, from second 100."""
    agent = TorchEvents(run_id="job", role="trainer", backend="c10d", host="h", program="train.py")
    texts = [
        text for n, event in enumerate(events) for text in agent.convert(EventRecord(n + 1, 100.0 + n, "node", event))
    ]
    return [json.loads(text) for text in texts]


def in_short(events: list[dict[str, Any]]) -> list[tuple[str, str, int | None]]:
    prefix = "torchelastic.worker.status."
    return [(e["source"], e["name"].removeprefix(prefix), e["metadata"]["global_rank"]) for e in events]


def test_workers_start_fail_and_are_stopped_and_the_agent_ends() -> None:
    events = converted(STARTED, WorkerFailed(1, 5, 71, "ValueError: x"), WorkersStopped(1, 0.1), AgentEnded(1, "spent"))
    assert in_short(events) == [
        ("WORKER", "START", 4),
        ("WORKER", "START", 5),
        ("WORKER", "FAILED", 5),
        ("WORKER", "TERMINATED", 4),
        ("AGENT", "FAILED", None),
    ]
    failed = events[2]
    assert failed["timestamp"] == 101_000
    about = failed["metadata"]
    assert {name: about[name] for name in ("run_id", "role", "rdzv_backend", "hostname", "worker_id")} == {
        "run_id": "job", "role": "trainer", "rdzv_backend": "c10d", "hostname": "h", "worker_id": "71",
    }  # fmt: skip
    assert (about["raw_error"], about["agent_restarts"], about["total_run_time"]) == ("ValueError: x", 2, 1)
    details = json.loads(about["metadata"])
    assert (details["local_rank"], details["worker_pid"], details["entry_point"]) == ([1], [71], "train.py")
    assert events[-1]["metadata"]["raw_error"] == "spent"


def test_workers_that_succeeded_are_not_reported_as_stopped() -> None:
    events = converted(STARTED, WorkersSucceeded(1), WorkersStopped(1, 0.0), AgentEnded(0, "all workers exited 0"))
    assert [name for _, name, _ in in_short(events)] == ["START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    assert events[-1]["source"] == "AGENT" and events[-1]["metadata"]["raw_error"] is None


def test_an_expired_timer_is_reported() -> None:
    (*_, missed) = converted(STARTED, TimersMissed(1, 5, 71, "timer expired: 'x' (1.0 s); ripstop sent SIGKILL"))
    assert (missed["name"], missed["source"]) == ("timer expired", "AGENT")
    assert json.loads(missed["metadata"]["metadata"])["worker_pid"] == "71"
    assert "'x'" in missed["metadata"]["raw_error"]


def test_events_without_a_counterpart_in_torch_are_left_out() -> None:
    assert converted(WarmedUp("zygote", (), 0.1, ""), WorkerFailed(1, 0, 0, "could not be started")) == []


def test_the_keys_are_those_of_torchs_agent() -> None:
    events = pytest.importorskip("torch.distributed.elastic.events")
    server = pytest.importorskip("torch.distributed.elastic.agent.server")

    class Handler:
        get_run_id = get_backend = lambda self: "x"

    class Agent(server.SimpleElasticAgent):
        _start_workers = _stop_workers = _monitor_workers = _shutdown = None

    agent = Agent(server.WorkerSpec("r", 1, Handler(), entrypoint=print))
    theirs = agent._construct_event("START", events.EventSource.WORKER, agent.get_worker_group().workers[0])
    (ours, *_) = converted(STARTED)
    assert events.Event.deserialize(json.dumps(ours)).source is events.EventSource.WORKER
    assert ours["metadata"].keys() == theirs.metadata.keys()
    assert json.loads(ours["metadata"]["metadata"]).keys() == json.loads(theirs.metadata["metadata"]).keys()

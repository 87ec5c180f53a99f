"""The events of a running job, through its API: past ones, and new ones as they come; and their text."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from ripstop.cli.job_client import JobClient
from ripstop.model.errors import RipstopError
from ripstop.model.event_json import from_json
from ripstop.model.text_formatting import one_line
from ripstop.telemetry.log_lines import log_line

IDLE_TIMEOUT_S = 60.0  # the stream has a keepalive every 15 s
NEXT_COORDINATOR_TIMEOUT_S = (
    15.0  # for the job's next coordinator to answer: the nodes elect it after a lease, 3 s by default
)
RETRY_S = 0.5


def stream_past_events(job: JobClient, since: int) -> Iterator[dict[str, Any]]:
    more = True
    while more:
        page = job.get("/events", since=since)
        yield from page["events"]
        since, more = page["last"], page["more"]


def follow_job_events(find_job: Callable[[], JobClient], since: int) -> Iterator[dict[str, Any]]:
    """Yield the events after number `since`, past and new, until the job ends; also when its coordinator moves.

    Each coordinator numbers the events anew, and has events that the one before it had.  `since` is a number of the
    first coordinator.
    """
    job = find_job()
    seen = (
        {streamed_event_identity(event) for event in stream_past_events(job, 0) if event["number"] <= since}
        if since
        else set()
    )
    is_elected = is_over = False
    lost_at: float | None = None
    while not is_over:
        try:
            for event in follow_events(job, 0):
                lost_at = None
                if not event["node"]:  # recorded by the coordinator
                    is_elected = event.get("is_elected", is_elected)
                    is_over = is_over or event["kind"] == "job_closed"
                if (identity := streamed_event_identity(event)) not in seen:
                    seen.add(identity)
                    yield event
            if not is_elected:
                return
        except RipstopError:
            lost_at = lost_at or time.monotonic()
            if not (is_over or is_elected) or time.monotonic() - lost_at > NEXT_COORDINATOR_TIMEOUT_S:
                raise
        if not is_over:
            time.sleep(RETRY_S)
            with suppress(RipstopError):  # the next attempt reports it
                job = find_job()


def streamed_event_identity(event: dict[str, Any]) -> tuple[str, int, float]:
    return event["node"], event["seq"], event["at"]


def follow_events(job: JobClient, since: int) -> Iterator[dict[str, Any]]:
    """Yield the events after number `since`, past and new, until the job ends or its coordinator stops."""
    for line in job.stream_lines("/events", "text/event-stream", IDLE_TIMEOUT_S, since=since):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def render_streamed_event(event: dict[str, Any]) -> str:
    """One line, or "" if the text of another event covers this one.  An unknown kind is shown by its fields."""
    entry = from_json(json.dumps(event))
    if entry is not None:
        text = log_line(entry.event)
    else:
        known = ("number", "v", "seq", "at", "node", "kind")
        text = " ".join([event["kind"], *(f"{name}={value}" for name, value in event.items() if name not in known)])
    time = datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S.%f")[:-3]
    return f"{event['number']:>5} {time} {event['node'] or 'coordinator'}: {one_line(text)}" if text else ""

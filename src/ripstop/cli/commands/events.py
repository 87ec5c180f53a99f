"""`ripstop events`: show a job's events."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobCommand, ParsedCommand, RunningJob
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import RipstopError
from ripstop.model.event_json import from_json
from ripstop.model.parsers import integer
from ripstop.model.text_formatting import one_line
from ripstop.telemetry.log_lines import log_line

HELP = f"""\
usage: ripstop events [-f] [--since N] [FLAGS]

Prints the events that a job's coordinator keeps, one per line, in the order in which it received them.  With --json,
each line is a JSON object as in events.jsonl, with the event's number in the job.

examples
  ripstop events -f           follow the job until it ends
  ripstop events --json | jq -c 'select(.kind == "round_ended")'

which events
  -f, --follow                continue with new events until the job ends
  --since N                   only events after number N
{JOB_HELP}"""
IDLE_TIMEOUT_S = 60.0  # the stream has a keepalive every 15 s
NEXT_COORDINATOR_TIMEOUT_S = (
    15.0  # for the job's next coordinator to answer: the nodes elect it after a lease, 3 s by default
)
RETRY_S = 0.5


def events(command: ParsedCommand) -> None:
    since = integer("--since", command.args.text("--since", "0"), minimum=0, maximum=2**53)
    if "--follow" in command.args:
        found = follow_job(command.find_job, since)
    else:
        found = _past_events(command.find_job(), since)
    for event in found:
        line = json.dumps(event, ensure_ascii=False) if command.as_json else render(event)
        if line:
            print(line, flush=True)


def _past_events(job: RunningJob, since: int) -> Iterator[dict[str, Any]]:
    more = True
    while more:
        page = job.get("/events", since=since)
        yield from page["events"]
        since, more = page["last"], page["more"]


def follow_job(find_job: Callable[[], RunningJob], since: int) -> Iterator[dict[str, Any]]:
    """Yield the events after number `since`, past and new, until the job ends; also when its coordinator moves.

    Each coordinator numbers the events anew, and has events that the one before it had.  `since` is a number of the
    first coordinator.
    """
    job = find_job()
    seen = {_identity(event) for event in _past_events(job, 0) if event["number"] <= since} if since else set()
    is_elected = is_over = False
    lost_at: float | None = None
    while not is_over:
        try:
            for event in follow_events(job, 0):
                lost_at = None
                if not event["node"]:  # recorded by the coordinator
                    is_elected = event.get("is_elected", is_elected)
                    is_over = is_over or event["kind"] == "job_closed"
                if (identity := _identity(event)) not in seen:
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


def _identity(event: dict[str, Any]) -> tuple[str, int, float]:
    return event["node"], event["seq"], event["at"]


def follow_events(job: RunningJob, since: int) -> Iterator[dict[str, Any]]:
    """Yield the events after number `since`, past and new, until the job ends or its coordinator stops."""
    for line in job.stream_lines("/events", "text/event-stream", IDLE_TIMEOUT_S, since=since):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def render(event: dict[str, Any]) -> str:
    """One line, or "" if the text of another event covers this one.  An unknown kind is shown by its fields."""
    entry = from_json(json.dumps(event))
    if entry is not None:
        text = log_line(entry.event)
    else:
        known = ("number", "v", "seq", "at", "node", "kind")
        text = " ".join([event["kind"], *(f"{name}={value}" for name, value in event.items() if name not in known)])
    time = datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S.%f")[:-3]
    return f"{event['number']:>5} {time} {event['node'] or 'coordinator'}: {one_line(text)}" if text else ""


COMMANDS = {"events": JobCommand(events, HELP, (*JOB_FLAGS, Flag("--follow", short="-f"), Flag("--since", "N")))}

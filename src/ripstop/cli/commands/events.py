"""`ripstop events`: show a job's events."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobCommand, ParsedCommand, RunningJob
from ripstop.cli.options.flags import Flag
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


def events(command: ParsedCommand) -> None:
    since = integer("--since", command.args.text("--since", "0"), minimum=0, maximum=2**53)
    job = command.find_job()
    for event in follow_events(job, since) if "--follow" in command.args else _past_events(job, since):
        line = json.dumps(event, ensure_ascii=False) if command.as_json else render(event)
        if line:
            print(line, flush=True)


def _past_events(job: RunningJob, since: int) -> Iterator[dict[str, Any]]:
    more = True
    while more:
        page = job.get("/events", since=since)
        yield from page["events"]
        since, more = page["last"], page["more"]


def follow_events(job: RunningJob, since: int) -> Iterator[dict[str, Any]]:
    """Yield the events after number `since`, past and new, until the job ends."""
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

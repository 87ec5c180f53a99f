"""`ripstop events`: what happened in a job, and what happens."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from ripstop.cli.job_client import ABOUT_JOBS, COMMON, Target, find, get, lines, read_command
from ripstop.cli.options.flags import Flag
from ripstop.model.event_text import log_line
from ripstop.model.events import from_json
from ripstop.model.parsers import integer
from ripstop.model.text import one_line

HELP = f"""\
usage: ripstop events [-f] [--since N] [FLAGS]

Says what happened in a job, one line an event: all that its coordinator remembers, in the order in which it learned
of it.  With --json, each line is a JSON object as in events.jsonl, with its number in the job.

  -f, --follow                go on with what happens from now on, until the job is over
  --since N                   only what came after the event of this number
{ABOUT_JOBS}"""
FLAGS = (
    *COMMON,
    Flag("--follow", short="-f", from_environment=False),
    Flag("--since", "N", from_environment=False),
)
SILENCE = 60.0  # seconds without a sign of life, in a stream that has one every 15


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("events", argv, HELP, FLAGS)) is None:
        return 0
    since = integer("--since", asked.given.text("--since", "0"), minimum=0, maximum=2**53)
    target = find(asked.given)
    for event in follow(target, since) if "--follow" in asked.given else _all(target, since):
        line = json.dumps(event, ensure_ascii=False) if asked.as_json else render(event)
        if line:
            print(line, flush=True)
    return 0


def _all(target: Target, since: int) -> Iterator[dict[str, Any]]:
    more = True
    while more:
        answer = get(target, "/events", since=since)
        yield from answer["events"]
        since, more = answer["last"], answer["more"]


def follow(target: Target, since: int) -> Iterator[dict[str, Any]]:
    """What came after the event of this number, and what comes, until the job is over."""
    for line in lines(target, "/events", "text/event-stream", SILENCE, since=since):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def render(event: dict[str, Any]) -> str:
    """The event in words; of a kind that has none here, its fields.  Empty where another event's words say it."""
    entry = from_json(json.dumps(event))
    if entry is not None:
        text = log_line(entry.event)
    else:
        known = ("number", "v", "seq", "at", "node", "kind")
        text = " ".join([event["kind"], *(f"{name}={value}" for name, value in event.items() if name not in known)])
    moment = datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S.%f")[:-3]
    return f"{event['number']:>5} {moment} {event['node'] or 'coordinator'}: {one_line(text)}" if text else ""

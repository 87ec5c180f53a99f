"""`ripstop events`: show a job's events."""

import json
from datetime import datetime
from typing import Any

from ripstop.cli.event_stream import follow_job_events, past_events
from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobCommand, ParsedCommand
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


def events(command: ParsedCommand) -> None:
    since = integer("--since", command.args.text("--since", "0"), minimum=0, maximum=2**53)
    if "--follow" in command.args:
        found = follow_job_events(command.find_job, since)
    else:
        found = past_events(command.find_job(), since)
    for event in found:
        line = json.dumps(event, ensure_ascii=False) if command.as_json else render_event(event)
        if line:
            print(line, flush=True)


def render_event(event: dict[str, Any]) -> str:
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

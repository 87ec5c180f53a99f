"""`ripstop events`: show a job's events."""

import json

from ripstop.cli.event_stream import follow_job_events, render_streamed_event, stream_past_events
from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import Flag
from ripstop.model.parsers import integer

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


def events(command: JobClientCommandLine) -> None:
    since = integer("--since", command.args.text("--since", "0"), minimum=0, maximum=2**53)
    if "--follow" in command.args:
        found = follow_job_events(command.find_job, since)
    else:
        found = stream_past_events(command.find_job(), since)
    for event in found:
        line = json.dumps(event, ensure_ascii=False) if command.as_json else render_streamed_event(event)
        if line:
            print(line, flush=True)


COMMANDS = {"events": JobCommand(events, HELP, (*JOB_FLAGS, Flag("--follow", short="-f"), Flag("--since", "N")))}

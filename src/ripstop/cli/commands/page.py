"""`ripstop page`: show a job in the browser."""

import asyncio
import sys

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import Flag
from ripstop.model.parsers import integer

HELP = f"""\
usage: ripstop page [--port N] [--no-browser] [FLAGS]

Opens a job's page in the browser: its state, timeline, ranks, logs, stacks and events.  The command serves it at an
address of this machine as long as it runs, through the job's socket or endpoint, so the page asks for no token.  A job
with a secret also has the page at its own address, http://HOST:PORT/, where it asks for the output of `ripstop token`.

examples
  ripstop page                                            on a machine with a browser
  ripstop page --no-browser --port=8000                   then, on your laptop: ssh -L 8000:localhost:8000 NODE

where
  --port N                    the port on 127.0.0.1 (any that is free), for example to forward it with ssh -L
  --no-browser                only print the address
{JOB_HELP}"""
FLAGS = (*JOB_FLAGS, Flag("--port", "N"), Flag("--no-browser"))


def page(command: JobClientCommandLine) -> None:
    from ripstop.cli.page_proxy import serve_page_proxy  # imports an HTTP server: only when needed

    port = integer("--port", command.args.text("--port", "0"), minimum=0, maximum=65535)
    job = command.find_job()
    job.get("/status")  # an error now, not in the browser

    def announce(url: str) -> None:
        command.print(url, {"url": url})
        sys.stdout.flush()
        if not command.as_json:
            print(f"{job}: the page is open until you press Ctrl-C", file=sys.stderr)

    asyncio.run(serve_page_proxy(command.find_job, port, announce, opens_browser="--no-browser" not in command.args))


COMMANDS = {"page": JobCommand(page, HELP, FLAGS)}

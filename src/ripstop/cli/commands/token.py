"""`ripstop token`: print the access token of a job's API."""

import os

from ripstop.cli.job_client import BASIC_FLAGS, JobClientCommandLine, JobCommand
from ripstop.model.errors import UsageError
from ripstop.model.parsers import identifier, parse_job_secret
from ripstop.protocol.secret import api_token

HELP = """\
usage: ripstop token [--job NAME] [--json]

Prints the access token of a job's API, derived from RIPSTOP_TOKEN (or RIPSTOP_TOKEN_FILE) and the job's id.

examples
  curl -H "Authorization: Bearer $(ripstop token --job=job7)" \\
      http://head:29400/api/v1/status

which job
  -j, --job NAME              the job's id (none)
  --json                      print JSON

Defaults are in parentheses.

Exit codes: 0 done; 2 there is no secret, or the command line is wrong.
"""


def token(command: JobClientCommandLine) -> None:
    secret, _ = parse_job_secret(os.environ)
    if not secret:
        raise UsageError("the token is derived from the job's secret; set it in RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE")
    found = api_token(secret, identifier("--job", command.args.text("--job", "none")))
    command.print(found, {"token": found})


COMMANDS = {"token": JobCommand(token, HELP, BASIC_FLAGS)}

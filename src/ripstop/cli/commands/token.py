"""`ripstop token`: what opens a job's API to other programs."""

import os
from collections.abc import Sequence

from ripstop.cli.job_client import NAMING, read_command, show_json
from ripstop.model.errors import UsageError
from ripstop.model.parsers import identifier, job_secret
from ripstop.protocol.secret import api_token

HELP = """\
usage: ripstop token [--job NAME] [--json]

Prints the token of a job's API, made of RIPSTOP_TOKEN (or RIPSTOP_TOKEN_FILE) and the job's id, for programs that send
it themselves:

  curl -H "Authorization: Bearer $(ripstop token --job=job7)" http://head:29400/api/v1/status

  -j, --job NAME              the job's id (none)
  --json                      the answer as JSON
"""
FLAGS = NAMING


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("token", argv, HELP, FLAGS)) is None:
        return 0
    token, _ = job_secret(os.environ)
    if not token:
        raise UsageError("a token is made of the job's secret; set RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE")
    made = api_token(token, identifier("--job", asked.given.text("--job", "none")))
    if asked.as_json:
        show_json({"token": made})
    else:
        print(made)
    return 0
